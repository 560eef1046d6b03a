"""From a Hugging Face config to Megatron models: what is supported is built, the rest is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from torpor.checkpoints.families import find_family, hybrid_mtp_pattern, hybrid_pattern
from torpor.errors import ConfigError, UnsupportedModelError
from torpor.megatron.capabilities import fused_kernels, uses_transformer_engine
from torpor.megatron.host import current_device, prepare_host
from torpor.megatron.parallel import Layout

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

Recompute = Literal["full", "selective"] | None
TransformerImpl = Literal["local", "transformer_engine"]
Config = Mapping[str, Any]


def build_transformer_config(
    hf_config: Config,
    layout: Layout,
    dtype: torch.dtype,
    *,
    recompute: Recompute = None,
    mtp: bool = True,
    per_token_loss: bool = False,
    transformer_impl: TransformerImpl = "transformer_engine",
) -> TransformerConfig:
    """Translate a Hugging Face config, or refuse it before anything is built.

    Args:
        hf_config: The content of `config.json`.
        layout: How the model is split over the ranks.
        dtype: Dtype of the parameters, `torch.float32` or `torch.bfloat16`.
        recompute: None, "full" (every layer) or "selective" (core attention).
        mtp: False leaves the multi-token-prediction layers out; the trunk is the same.
        per_token_loss: Whether a step's loss is a mean over its tokens rather than over its micro-batches.
        transformer_impl: Whose layers: "transformer_engine", local ones where it is missing, or "local".

    Returns:
        The Megatron configuration of this model at this layout.

    Raises:
        UnsupportedModelError: The config asks for something that is not implemented here.
        ConfigError: The layout does not divide the model, or an argument is not one of those above.
    """
    architecture = _find_architecture(hf_config)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"dtype is {dtype}; supported are torch.float32 and torch.bfloat16")
    if recompute not in (None, "full", "selective"):
        raise ConfigError(f"recompute is {recompute!r}; supported are None, 'full' and 'selective'")
    if transformer_impl not in ("transformer_engine", "local"):
        raise ConfigError(
            f"transformer_impl is {transformer_impl!r}; supported are 'transformer_engine' and 'local'"
        )
    architecture.check(hf_config)
    prepare_host()
    is_engine = uses_transformer_engine(transformer_impl)
    fields = architecture.translate(hf_config)
    if fields.get("moe_latent_size") is not None and not is_engine:
        _refuse_latent_experts(fields["moe_latent_size"], transformer_impl)
    _check_layout(hf_config, fields, layout)

    num_mtp_layers = find_family(hf_config).declared_mtp_layers(hf_config) if mtp else 0

    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **fields,
        **_parallel_fields(layout, dtype),
        **_recompute_fields(recompute),
        **fused_kernels(swiglu=fields["gated_linear_unit"], rotary=architecture.is_rotary),
        mtp_num_layers=num_mtp_layers or None,
        transformer_impl=transformer_impl,
        moe_grouped_gemm=is_engine and "num_moe_experts" in fields,
        calculate_per_token_loss=per_token_loss,
        normalization="RMSNorm",
        add_bias_linear=False,
        init_method_std=hf_config.get("initializer_range", 0.02),
        # Only probabilities that the config itself asks for: Megatron's own defaults are 0.1.
        hidden_dropout=0.0,
        attention_dropout=float(hf_config.get("attention_dropout") or 0.0),
    )


def build_model(
    hf_config: Config,
    layout: Layout,
    dtype: torch.dtype,
    *,
    recompute: Recompute = None,
    mtp: bool = True,
    per_token_loss: bool = False,
    transformer_impl: TransformerImpl = "transformer_engine",
) -> list[MegatronModule]:
    """Build this rank's part of the model with Megatron's random initialisation.

    Args:
        hf_config: The content of `config.json`.
        layout: How the model is split over the ranks; the process groups of it must exist.
        dtype: Dtype of the parameters, `torch.float32` or `torch.bfloat16`.
        recompute: None, "full" (every layer) or "selective" (core attention).
        mtp: False leaves the multi-token-prediction layers out; the trunk is the same.
        per_token_loss: Whether a step's loss is a mean over its tokens rather than over its micro-batches.
        transformer_impl: Whose layers: "transformer_engine", local ones where it is missing, or "local".

    Returns:
        The chunks of this rank's pipeline stage, bare: no DDP, no mixed-precision wrapper.

    Raises:
        UnsupportedModelError: The config asks for something that is not implemented here.
        ConfigError: The layout does not divide the model.
    """
    config = build_transformer_config(
        hf_config,
        layout,
        dtype,
        recompute=recompute,
        mtp=mtp,
        per_token_loss=per_token_loss,
        transformer_impl=transformer_impl,
    )
    from megatron.core import parallel_state

    chunk = _find_architecture(hf_config).build(
        hf_config,
        config,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    _drop_dangling_output_weight(chunk)
    # Routers are built on the CPU and move in their first forward (transformer/moe/router.py): too late for
    # an optimizer that is built, or loaded, before that.
    return [chunk.to(current_device())]


def hybrid_layer_pattern(hf_config: Config, pipeline: int = 1, mtp: bool = True) -> str:
    """Write a hybrid model's layers the way Megatron's HybridModel reads them.

    Four layers `ME*-` on two pipeline stages with two MTP layers `*E` give `ME|*-/*E/*E`.

    Args:
        hf_config: The content of a `nemotron_h` config.
        pipeline: Number of pipeline stages; it divides the number of layers.
        mtp: False leaves the MTP layers out.

    Returns:
        Main pattern with stage boundaries, then one part for each MTP layer.
    """
    main = hybrid_pattern(hf_config)
    per_stage = len(main) // pipeline
    parts = ["|".join(main[i * per_stage : (i + 1) * per_stage] for i in range(pipeline))]
    if mtp:
        parts += [hybrid_mtp_pattern(hf_config)] * find_family(hf_config).declared_mtp_layers(hf_config)
    return "/".join(parts)


# --- families -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Architecture:
    """How one family becomes a Megatron model."""

    check: Callable[[Config], None]
    translate: Callable[[Config], dict[str, Any]]
    build: Callable[..., MegatronModule]
    is_rotary: bool


def _find_architecture(hf_config: Config) -> _Architecture:
    name = find_family(hf_config).name
    try:
        return _ARCHITECTURES[name]
    except KeyError:
        raise UnsupportedModelError(
            f"family {name} can be read but not trained; trainable families: {', '.join(_ARCHITECTURES)}"
        ) from None


# Fields that change the mathematics of any family and that no builder here implements: name, value that
# means "off". Absent and null mean off too.
_OFF_EVERYWHERE: tuple[tuple[str, Any], ...] = (
    ("quantization_config", None),
    ("mlp_bias", False),
    ("attn_logit_softcapping", None),
    ("final_logit_softcapping", None),
    ("use_qk_norm", False),
    ("qk_layernorm", False),
    ("attention_sink", False),
    ("logit_scale", 1.0),
    ("embedding_multiplier", 1.0),
)


def _check_nemotron_h(hf_config: Config) -> None:
    for field, off in _OFF_EVERYWHERE:
        _check_field(hf_config, field, off)
    for field in ("attention_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"):
        _check_field(hf_config, field, False)
    for field in ("sliding_window", "rope_scaling"):
        _check_field(hf_config, field, None)
    _check_field(hf_config, "hidden_dropout", 0.0)
    _check_field(hf_config, "mlp_hidden_act", "relu2")
    # A second spelling that Transformers accepts; reading only the first would ignore it silently.
    for alias, name in (
        ("mamba_n_groups", "n_groups"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_dt_limit", "time_step_limit"),
        ("mamba_conv_bias", "use_conv_bias"),
    ):
        if alias in hf_config and hf_config[alias] != hf_config.get(name):
            _refuse(alias, hf_config[alias], f"the field written as {name}")

    symbols = _all_layer_symbols(hf_config)
    if "M" in symbols:
        _check_field(hf_config, "mamba_hidden_act", "silu")
        _check_field(hf_config, "use_conv_bias", True)
        _check_field(hf_config, "conv_kernel", 4)
        # Megatron's mixer normalises with 1e-5 whatever the model's epsilon is.
        _check_field(hf_config, "layer_norm_epsilon", 1e-5)
        # Megatron's mixer does not clamp the time step. Transformers' clamps it at time_step_min, not at
        # this field, which shows only where a step is smaller than that.
        limit = hf_config.get("time_step_limit")
        if limit is not None and [float(end) for end in limit] != [0.0, float("inf")]:
            _refuse("time_step_limit", limit, "[0.0, Infinity]")
    if "E" in symbols:
        _check_router(hf_config)


def _check_router(hf_config: Config) -> None:
    _check_field(hf_config, "n_shared_experts", 1)
    top_k = _integer(hf_config, "num_experts_per_tok", 2)
    groups, top_groups = _integer(hf_config, "n_group", 1), _integer(hf_config, "topk_group", 1)
    experts = _integer(hf_config, "n_routed_experts", 8)
    if experts % groups:
        _refuse("n_group", groups, f"a divisor of n_routed_experts = {experts}")
    # Megatron normalises sigmoid scores over the chosen experts exactly when there are several.
    _check_field(hf_config, "norm_topk_prob", top_k > 1, default=True)
    # The published router scores a group by its two best experts, Megatron by its top_k / topk_group best.
    if 1 <= top_groups < groups and top_k // top_groups != 2:
        _refuse("topk_group", top_groups, f"n_group = {groups} or half of num_experts_per_tok = {top_k}")


def _translate_nemotron_h(hf_config: Config) -> dict[str, Any]:
    from megatron.core.activations import squared_relu

    symbols = _all_layer_symbols(hf_config)
    heads = _integer(hf_config, "num_attention_heads", 32)
    fields: dict[str, Any] = {
        "num_layers": len(hybrid_pattern(hf_config)),
        "hidden_size": _integer(hf_config, "hidden_size", 4096),
        "ffn_hidden_size": _integer(hf_config, "intermediate_size", 21504),
        "num_attention_heads": heads,
        "num_query_groups": _integer(hf_config, "num_key_value_heads", heads),
        "kv_channels": _integer(hf_config, "head_dim", 128),
        "layernorm_epsilon": float(hf_config.get("layer_norm_epsilon", 1e-5)),
        "activation_func": squared_relu,
        "gated_linear_unit": False,
    }
    if "M" in symbols:
        fields |= {
            "mamba_state_dim": _integer(hf_config, "ssm_state_size", 128),
            "mamba_head_dim": _integer(hf_config, "mamba_head_dim", 64),
            "mamba_num_heads": _integer(hf_config, "mamba_num_heads", 128),
            "mamba_num_groups": _integer(hf_config, "n_groups", 8),
        }
    if "E" in symbols:
        groups, top_groups = _integer(hf_config, "n_group", 1), _integer(hf_config, "topk_group", 1)
        is_limited = top_groups < groups
        fields |= {
            "num_moe_experts": _integer(hf_config, "n_routed_experts", 8),
            "moe_router_topk": _integer(hf_config, "num_experts_per_tok", 2),
            "moe_router_num_groups": groups if is_limited else None,
            "moe_router_group_topk": top_groups if is_limited else None,
            "moe_router_topk_scaling_factor": float(hf_config.get("routed_scaling_factor", 1.0)),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
            # The expert bias balances the load; a loss term of our own would not be the source's recipe.
            "moe_router_load_balancing_type": "none",
            "moe_ffn_hidden_size": _integer(hf_config, "moe_intermediate_size", 7688),
            "moe_shared_expert_intermediate_size": _integer(
                hf_config, "moe_shared_expert_intermediate_size", 7688
            ),
            "moe_latent_size": hf_config.get("moe_latent_size"),
            "moe_token_dispatcher_type": "alltoall",
        }
    return fields


def _build_nemotron_h(hf_config: Config, config: TransformerConfig, **stage: bool) -> MegatronModule:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from torpor.megatron.specs import hybrid_stack_spec

    return HybridModel(
        config=config,
        hybrid_stack_spec=hybrid_stack_spec(config),
        vocab_size=_integer(hf_config, "vocab_size", 131072),
        max_sequence_length=_integer(hf_config, "max_position_embeddings", 4096),
        hybrid_layer_pattern=hybrid_layer_pattern(
            hf_config, config.pipeline_model_parallel_size, mtp=config.mtp_num_layers is not None
        ),
        share_embeddings_and_output_weights=bool(hf_config.get("tie_word_embeddings", False)),
        position_embedding_type="none",
        **stage,
    )


def _check_mimo(hf_config: Config) -> None:
    for field, off in _OFF_EVERYWHERE:
        _check_field(hf_config, field, off)
    _check_field(hf_config, "attention_bias", True)
    _check_field(hf_config, "hidden_act", "silu")
    _check_field(hf_config, "use_sliding_window", False)
    _check_field(hf_config, "use_mrope", False)
    _check_field(hf_config, "partial_rotary_factor", 1.0)
    for kind in hf_config.get("layer_types") or ():
        if kind != "full_attention":
            _refuse("layer_types", kind, "full_attention for every layer")
    for field in ("rope_scaling", "rope_parameters"):
        rope = hf_config.get(field) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            _refuse(f"{field}.rope_type", kind, "default")


def _translate_mimo(hf_config: Config) -> dict[str, Any]:
    heads, hidden_size = _integer(hf_config, "num_attention_heads"), _integer(hf_config, "hidden_size")
    return {
        "num_layers": _integer(hf_config, "num_hidden_layers"),
        "hidden_size": hidden_size,
        "ffn_hidden_size": _integer(hf_config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": _integer(hf_config, "num_key_value_heads", heads),
        "kv_channels": _integer(hf_config, "head_dim", hidden_size // heads),
        "layernorm_epsilon": float(hf_config.get("rms_norm_eps", 1e-6)),
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_qkv_bias": True,
    }


def _build_mimo(hf_config: Config, config: TransformerConfig, **stage: bool) -> MegatronModule:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from torpor.megatron.specs import gpt_layer_spec, gpt_mtp_block_spec

    rope = hf_config.get("rope_parameters") or {}
    return GPTModel(
        config=config,
        transformer_layer_spec=gpt_layer_spec(config),
        mtp_block_spec=gpt_mtp_block_spec(config) if config.mtp_num_layers else None,
        vocab_size=_integer(hf_config, "vocab_size"),
        max_sequence_length=_integer(hf_config, "max_position_embeddings", 32768),
        share_embeddings_and_output_weights=bool(hf_config.get("tie_word_embeddings", False)),
        position_embedding_type="rope",
        rotary_base=rope.get("rope_theta", hf_config.get("rope_theta", 10000.0)),
        **stage,
    )


_ARCHITECTURES = {
    "nemotron_h": _Architecture(_check_nemotron_h, _translate_nemotron_h, _build_nemotron_h, is_rotary=False),
    "mimo": _Architecture(_check_mimo, _translate_mimo, _build_mimo, is_rotary=True),
}


# --- fields of the config -------------------------------------------------------------------------------


def _all_layer_symbols(hf_config: Config) -> str:
    return hybrid_layer_pattern(hf_config).replace("/", "")


def _integer(hf_config: Config, field: str, default: int | None = None) -> int:
    value = hf_config.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse(field, value, "a positive whole number")
    return value


def _check_field(hf_config: Config, field: str, supported: Any, default: Any = None) -> None:
    value = hf_config.get(field)
    value = default if value is None else value
    if value is not None and value != supported:
        _refuse(field, value, repr(supported))


def _refuse_latent_experts(width: int, transformer_impl: TransformerImpl) -> NoReturn:
    raise UnsupportedModelError(
        f"config.json has moe_latent_size = {width}: Megatron-Core builds latent experts of Transformer"
        " Engine's layers alone\n  "
        + (
            "Leave quantisation and adapters out: for them a model is built of local layers."
            if transformer_impl == "local"
            else "Install transformer-engine on a CUDA machine to use this model."
        )
    )


def _refuse(field: str, value: Any, supported: str) -> NoReturn:
    raise UnsupportedModelError(f"config.json has {field} = {value!r}; supported is {supported}")


# --- layout ---------------------------------------------------------------------------------------------


def _check_layout(hf_config: Config, fields: dict[str, Any], layout: Layout) -> None:
    tensor, pipeline, expert = layout.tensor, layout.pipeline, layout.expert
    experts = fields.get("num_moe_experts")
    if experts is None and expert > 1:
        raise ConfigError(f"expert parallel size is {expert} but the model has no experts; it must be 1")
    if experts is not None and tensor > 1 and not layout.sequence_parallel:
        raise ConfigError(
            f"tensor parallel size is {tensor} on a model with experts; that needs sequence_parallel: true"
        )
    _check_divides("pipeline", pipeline, "num_hidden_layers", fields["num_layers"])
    _check_divides("expert", expert, "n_routed_experts", experts or 1)
    for name, count in (
        ("num_attention_heads", fields["num_attention_heads"]),
        ("num_key_value_heads", fields["num_query_groups"]),
        ("intermediate_size", fields["ffn_hidden_size"]),
        ("vocab_size", _integer(hf_config, "vocab_size")),
        # eh_proj and a sequence-parallel trunk split the hidden dimension or leave it whole.
        ("hidden_size", fields["hidden_size"]),
        ("mamba_num_heads", fields.get("mamba_num_heads")),
        ("n_groups", fields.get("mamba_num_groups")),
        ("moe_intermediate_size", fields.get("moe_ffn_hidden_size")),
        ("moe_shared_expert_intermediate_size", fields.get("moe_shared_expert_intermediate_size")),
    ):
        if count is not None:
            _check_divides("tensor", tensor, name, count)
    if "mamba_num_heads" in fields:
        _check_mamba_context(fields, layout)


def _check_mamba_context(fields: dict[str, Any], layout: Layout) -> None:
    heads, groups = (fields[name] // layout.tensor for name in ("mamba_num_heads", "mamba_num_groups"))
    _check_divides("context", layout.context, "mamba_num_heads / tensor parallel size", heads)
    if groups % layout.context and layout.context % groups:
        raise ConfigError(
            f"context parallel size {layout.context} neither divides n_groups / tensor parallel size = "
            f"{groups} nor is a multiple of it: each rank takes whole groups of a Mamba layer, or part of one"
        )


def _check_divides(axis: str, size: int, name: str, count: int) -> None:
    if count % size:
        divisors = [str(n) for n in range(1, min(count, 64) + 1) if count % n == 0]
        raise ConfigError(
            f"{axis} parallel size {size} does not divide {name} = {count}; "
            f"possible sizes: {', '.join(divisors)}"
        )


def _parallel_fields(layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": layout.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    }


def _recompute_fields(recompute: Recompute) -> dict[str, Any]:
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def _drop_dangling_output_weight(chunk: MegatronModule) -> None:
    """Take away the output weight that no forward uses.

    With tied embeddings the MTP stage projects with its copy of the embedding, yet Megatron allocates an
    `output_layer.weight` there when the stage has no first layer. It stays random, is synchronised with
    nothing, and makes `sharded_state_dict` assert (megatron/core/models/common/language_module).
    """
    is_tied = chunk.share_embeddings_and_output_weights
    if chunk.post_process and is_tied and chunk.mtp_process and not chunk.pre_process:
        del chunk.output_layer.weight
        chunk.output_layer.register_parameter("weight", None)
