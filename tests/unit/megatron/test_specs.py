"""The local layer specs: both model classes train, and save under the names of Transformer Engine's specs."""

import dataclasses

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from torpor.errors import UnsupportedModelError
from torpor.megatron import capabilities, specs
from torpor.megatron.host import current_device
from torpor.megatron.mamba import TorchMambaMixer

pytestmark = pytest.mark.usefixtures("megatron_rank")
VOCABULARY, LENGTH = 64, 12


def make_config(**fields) -> TransformerConfig:
    base = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_num_groups": 2,
        "mamba_state_dim": 8,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 16,
        "moe_router_topk": 2,
        "moe_shared_expert_intermediate_size": 16,
        "moe_token_dispatcher_type": "alltoall",
        "mtp_num_layers": 1,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "masked_softmax_fusion": False,
    }
    return TransformerConfig(**base | fields)


def build_hybrid(pattern: str = "M*E-/*E", **fields) -> HybridModel:
    config = make_config(is_hybrid_model=True, **fields)
    model = HybridModel(
        config, specs.hybrid_stack_spec(config), VOCABULARY, LENGTH, hybrid_layer_pattern=pattern
    )
    return model.to(current_device())  # Megatron builds routers on the CPU


def build_gpt(**fields) -> GPTModel:
    config = make_config(**{"num_layers": 2, "moe_layer_freq": [0, 1]} | fields)
    return GPTModel(
        config,
        specs.gpt_layer_spec(config),
        VOCABULARY,
        LENGTH,
        position_embedding_type="rope",
        mtp_block_spec=specs.gpt_mtp_block_spec(config),
    ).to(current_device())


def compute_loss(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ids = ids.to(current_device())
    positions = torch.arange(LENGTH, device=ids.device).expand(2, -1)
    mask = torch.ones(LENGTH, LENGTH, device=ids.device).triu(1).bool()[None, None]
    return model(ids, positions, mask, labels=ids.roll(-1, 1)).mean()


def saved_names(model: torch.nn.Module) -> set[str]:
    """The keys of the distributed checkpoint, without the empty extra states of Transformer Engine."""
    sharded = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    return {value.key for value in sharded.values() if not value.key.endswith("_extra_state")}


@pytest.mark.parametrize("build", [build_hybrid, build_gpt])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"params_dtype": torch.bfloat16, "bf16": True},
        {"mtp_num_layers": None},
        {"moe_token_dispatcher_type": "allgather"},
        {"qk_layernorm": True},
    ],
    ids=lambda fields: ",".join(fields) or "plain",
)
def test_every_parameter_gets_a_gradient(build, fields: dict) -> None:
    if build is build_hybrid and "mtp_num_layers" in fields:
        fields = fields | {"pattern": "M*E-"}
    model = build(**fields)
    loss = compute_loss(model)
    assert 3.5 < loss.item() < 5  # ln 64 = 4.16
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        # An expert that no token was sent to has a gradient of zeros.
        assert parameter.grad.any() or ".local_experts." in name, name


@pytest.mark.parametrize("build", [build_hybrid, build_gpt])
def test_full_recompute_changes_nothing(build) -> None:
    fields = {"mtp_num_layers": None} if build is build_gpt else {"pattern": "M*E-", "mtp_num_layers": None}
    plain = build(**fields)
    again = build(**fields, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    again.load_state_dict(plain.state_dict())
    compute_loss(plain).backward()
    compute_loss(again).backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


MOE = {
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc2.weight",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
}
MLP = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
}
MAMBA = {
    "mixer.in_proj.layer_norm_weight",
    "mixer.in_proj.weight",
    "mixer.conv1d.weight",
    "mixer.conv1d.bias",
    "mixer.dt_bias",
    "mixer.A_log",
    "mixer.D",
    "mixer.norm.weight",
    "mixer.out_proj.weight",
}
MTP = {f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")}
ENDS = {"embedding.word_embeddings.weight", "output_layer.weight"}


def under(prefix: str, *layers: set[str]) -> set[str]:
    return {prefix + name for layer in layers for name in layer}


def test_hybrid_saves_under_the_names_of_transformer_engines_spec() -> None:
    assert saved_names(build_hybrid()) == (
        ENDS
        | MTP
        | {"decoder.final_norm.weight"}
        | under("decoder.layers.0.", MAMBA)
        | under("decoder.layers.1.", ATTENTION)
        | under("decoder.layers.2.", MOE)
        | under("decoder.layers.3.", MLP)
        | under("mtp.layers.0.mtp_model_layer.layers.0.", ATTENTION)
        | under("mtp.layers.0.mtp_model_layer.layers.1.", MOE)
    )


def test_gpt_saves_under_the_names_of_transformer_engines_spec() -> None:
    qk = {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
    assert saved_names(build_gpt(qk_layernorm=True)) == (
        ENDS
        | MTP
        | {"decoder.final_layernorm.weight"}
        | under("decoder.layers.0.", ATTENTION, qk, MLP)
        | under("decoder.layers.1.", ATTENTION, qk, MOE)
        | under("mtp.layers.0.transformer_layer.", ATTENTION, qk, MOE)
    )


def test_packed_weights_are_saved_part_by_part() -> None:
    sharded = build_hybrid("M").sharded_state_dict(metadata={"non_homogeneous_layers": True})
    parts = {}
    for name in ("in_proj.weight", "conv1d_weight", "conv1d_bias"):
        for part in sharded[f"decoder.layers.0.mixer.{name}"].build():
            parts[part.key.removeprefix("decoder.layers.0.mixer.")] = part.global_shape
    inner, bc = 4 * 8, 2 * 8
    assert parts == {
        "in_proj.weight.z": (inner, 32),
        "in_proj.weight.x": (inner, 32),
        "in_proj.weight.B": (bc, 32),
        "in_proj.weight.C": (bc, 32),
        "in_proj.weight.dt": (4, 32),
        "conv1d.weight.x": (inner, 1, 4),
        "conv1d.weight.B": (bc, 1, 4),
        "conv1d.weight.C": (bc, 1, 4),
        "conv1d.bias.x": (inner,),
        "conv1d.bias.B": (bc,),
        "conv1d.bias.C": (bc,),
    }


def test_megatrons_own_final_norm_is_left_alone() -> None:
    before = hybrid_block.TENorm
    model = build_hybrid()
    assert hybrid_block.TENorm is before
    assert isinstance(model.decoder, hybrid_block.HybridStack)
    assert model.decoder.post_layer_norm
    assert isinstance(model.decoder.final_norm, torch.nn.RMSNorm)
    # The stack inside an MTP layer has none: the layer has a final norm of its own.
    assert not hasattr(model.mtp.layers[0].mtp_model_layer, "final_norm")


def test_the_final_norm_is_applied() -> None:
    model = build_hybrid("M", mtp_num_layers=None)
    torch.nn.init.zeros_(model.decoder.final_norm.weight)
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device=current_device())
    logits = model(ids, torch.arange(LENGTH, device=ids.device)[None], None)
    assert torch.equal(logits, torch.zeros_like(logits))


def test_an_mtp_layer_is_built_like_the_last_decoder_layer() -> None:
    dense = build_gpt(moe_layer_freq=[1, 0])
    assert not hasattr(dense.mtp.layers[0].mtp_model_layer.mlp, "router")
    moe = build_gpt(moe_layer_freq=2, num_layers=3)  # layers 0 and 2
    assert hasattr(moe.mtp.layers[0].mtp_model_layer.mlp, "router")


def test_no_mtp_layers_no_mtp_block() -> None:
    assert specs.gpt_mtp_block_spec(make_config(mtp_num_layers=None)) is None


def test_two_mtp_layers() -> None:
    names = saved_names(build_gpt(mtp_num_layers=2))
    assert "mtp.layers.1.transformer_layer.self_attention.linear_qkv.weight" in names


def test_a_pattern_that_names_too_many_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="moe_layer_freq names 3 layers"):
        specs.gpt_layer_spec(make_config(num_layers=2, moe_layer_freq=[0, 1, 1]))


def test_latent_attention_is_refused() -> None:
    config = make_config()
    config.multi_latent_attention = True
    with pytest.raises(UnsupportedModelError, match="multi_latent_attention"):
        specs.gpt_layer_spec(config)


def test_transformer_engine_without_mamba_ssm_gets_the_torch_mixer() -> None:
    """Only the class of the mixer is replaced, in a copy."""
    local = specs.hybrid_stack_spec(make_config())
    layer = local.submodules.mamba_layer
    upstream_mixer = dataclasses.replace(layer.submodules.mixer, module=object)
    upstream_layer = ModuleSpec(
        layer.module, submodules=dataclasses.replace(layer.submodules, mixer=upstream_mixer)
    )
    upstream = ModuleSpec(
        local.module, submodules=dataclasses.replace(local.submodules, mamba_layer=upstream_layer)
    )
    replaced = specs._with_torch_mixer(upstream)
    assert replaced.submodules.mamba_layer.submodules.mixer.module is TorchMambaMixer
    assert replaced.submodules.mamba_layer.submodules.mixer.submodules is upstream_mixer.submodules
    assert replaced.submodules.attention_layer is upstream.submodules.attention_layer
    assert upstream.submodules.mamba_layer.submodules.mixer.module is object


def test_capabilities_of_this_installation() -> None:
    """Fused kernels are only used where there is a device for them."""
    assert not capabilities.has_transformer_engine()
    assert not capabilities.has_mamba_ssm()
