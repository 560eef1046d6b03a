"""Dormant equals built-without-MTP for every kind of model and MTP layer that Megatron-Core builds."""

import pytest
import torch

from parity import FULL_RECOMPUTE, assert_parity, assert_same, run
from tiny_models import (
    GPT,
    GPT_LEARNED,
    GPT_REPEATED,
    HYBRID,
    HYBRID_MAMBA_MTP,
    HYBRID_TIED,
    VOCAB,
    Kind,
    batch,
    build_pair,
    same_bytes,
)
from torpor import UnsupportedModelError, freeze_mtp

pytestmark = pytest.mark.usefixtures("megatron_rank")

MORE_KINDS = [
    GPT_REPEATED,
    GPT_LEARNED,
    HYBRID_MAMBA_MTP,
    Kind("gpt-learned-tied", positions="learned_absolute", tied=True),
    Kind("gpt-three-depths-tied", depths=3, tied=True),
    Kind("gpt-moe-repeated", moe=True, depths=3, repeated=True),
    Kind("hybrid-repeated", pattern="M*-M", depths=2, repeated=True),
    Kind("hybrid-experts-in-mtp-only", pattern="M*-", mtp_pattern="E", moe=True),
    Kind("hybrid-experts-in-trunk-only", pattern="M*-E", mtp_pattern="*", moe=True),
    Kind("hybrid-attention-free", pattern="MM", mtp_pattern="M"),
    Kind("hybrid-all-in-mtp", pattern="M*-E", mtp_pattern="M*E-", moe=True, depths=2),
]


@pytest.mark.parametrize("recompute", [{}, FULL_RECOMPUTE], ids=["no-recompute", "full-recompute"])
@pytest.mark.parametrize("kind", MORE_KINDS, ids=str)
def test_kinds_of_layers(kind, recompute):
    """Dense, MoE and Mamba layers inside MTP, any depth, one layer repeated, tied, learned positions."""
    assert_parity(kind, **recompute)


@pytest.mark.parametrize("kind", [GPT, HYBRID_TIED], ids=str)
@pytest.mark.parametrize("setting", ["mtp_detach_heads", "use_mup", "calculate_per_token_loss"])
def test_settings_that_change_how_mtp_trains(kind, setting):
    """Detached heads, MuP's scaled logits and per-token losses are MTP's business, or the trunk's own."""
    assert_parity(kind, **{setting: True})


@pytest.mark.parametrize("kind", [HYBRID, HYBRID_TIED], ids=str)
def test_mamba_model(kind, monkeypatch):
    """MambaModel is a class of its own, derived from HybridModel."""
    from megatron.core.models.hybrid import hybrid_model
    from megatron.core.models.mamba.mamba_model import MambaModel

    monkeypatch.setattr(hybrid_model, "HybridModel", MambaModel)
    assert type(assert_parity(kind)) is MambaModel


def test_a_repeated_layer_is_retained_once():
    """`mtp_num_layers` counts repetitions there: one physical layer, one set of tensors."""
    dormant = assert_parity(GPT_REPEATED)
    assert dormant.config.mtp_num_layers == 2
    assert len(dormant.mtp.layers) == 1


def test_turning_a_repeated_layer_off_by_its_count_is_refused():
    """Count 0 with heads built neither runs nor retains them upstream: it crashes in the first step."""
    model = assert_parity(GPT_REPEATED)
    del vars(model)["_call_impl"]
    model.config.mtp_num_layers = 0
    with pytest.raises(
        UnsupportedModelError, match=r"has an MTP block, but its config says mtp_num_layers=0"
    ):
        freeze_mtp(model)


def build_mla(mtp, **overrides):
    """Build a GPTModel with multi-latent attention from Megatron's local spec.

    Megatron's local DotProductAttention cannot be told MLA's head sizes (transformer/dot_product_attention.py
    lacks k_channels and v_channels); with sizes that happen to equal `kv_channels` it needs no telling.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    class AttentionOfEqualHeads(DotProductAttention):
        def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
            assert {k_channels, v_channels} <= {None, kwargs["config"].kv_channels}
            super().__init__(*args, **kwargs)

    torch.manual_seed(1)
    config = MLATransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        kv_channels=12,
        ffn_hidden_size=48,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=12,
        multi_latent_attention=True,
        rope_type="rope",
        apply_rope_fusion=False,
        normalization="RMSNorm",
        add_bias_linear=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
        mtp_num_layers=1 if mtp else None,
        **overrides,
    )
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = AttentionOfEqualHeads
    mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if mtp else None
    model = GPTModel(config, spec, VOCAB, 32, position_embedding_type="rope", mtp_block_spec=mtp_spec)
    return model.to(batch()["input_ids"].device)


@pytest.mark.parametrize("recompute", [{}, FULL_RECOMPUTE], ids=["no-recompute", "full-recompute"])
def test_multi_latent_attention(recompute):
    """MLA in the trunk and inside MTP, with rotary frequencies of its own."""
    dormant, reference = build_mla(mtp=True, **recompute), build_mla(mtp=False, **recompute)
    reference.load_state_dict({n: t for n, t in dormant.state_dict().items() if not n.startswith("mtp.")})
    handle = freeze_mtp(dormant)
    assert any("linear_kv_down_proj" in name for name in handle.fingerprint())
    assert_same(dormant, reference)


def test_experts_asked_to_be_grouped():
    """Without Transformer Engine Megatron builds the experts one by one all the same."""
    assert_parity(Kind("gpt-moe-grouped", moe=True), moe_grouped_gemm=True)


@pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
def test_an_untied_output_layer_does_not_feel_mtp(kind):
    """Awake, the MTP loss moves an untied output layer; asleep, its gradient is the trunk's alone."""
    awake, reference = build_pair(kind)
    expected = run(reference)[1]["output_layer.weight"]
    assert not same_bytes(run(awake)[1]["output_layer.weight"], expected)
    dormant = assert_parity(kind)
    assert same_bytes(dormant.output_layer.weight.grad, expected)
