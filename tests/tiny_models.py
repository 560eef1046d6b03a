"""Tiny Megatron-Core models with and without MTP layers, for tests. The host must be prepared before."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

VOCAB = 64
SEQUENCE = 16


@dataclass(frozen=True)
class Kind:
    """A model to build: `pattern` makes it a HybridModel, None a GPTModel."""

    name: str
    pattern: str | None = None
    mtp_pattern: str = "*-"
    moe: bool = False
    tied: bool = False
    depths: int = 1
    repeated: bool = False
    positions: str = "rope"  # of a GPTModel

    def __str__(self) -> str:
        return self.name


GPT = Kind("gpt")
GPT_TIED = Kind("gpt-tied", tied=True)
GPT_MOE = Kind("gpt-moe", moe=True)
GPT_TWO_DEPTHS = Kind("gpt-two-depths", depths=2)
GPT_REPEATED = Kind("gpt-repeated", depths=2, repeated=True)
GPT_LEARNED = Kind("gpt-learned", positions="learned_absolute")
HYBRID = Kind("hybrid", pattern="M*-M")
HYBRID_TIED = Kind("hybrid-tied", pattern="M*-M", tied=True)
HYBRID_MOE = Kind("hybrid-moe", pattern="M*EM", mtp_pattern="*E", moe=True, depths=2)
HYBRID_MAMBA_MTP = Kind("hybrid-mamba-mtp", pattern="M*-M", mtp_pattern="M-")
KINDS = [GPT, GPT_TIED, GPT_MOE, GPT_TWO_DEPTHS, HYBRID, HYBRID_TIED, HYBRID_MOE]


def build(
    kind: Kind, *, mtp: bool = True, seed: int = 1, vp_stage: int | None = None, **overrides: Any
) -> torch.nn.Module:
    """Build this rank's stage of the model, seeded; `overrides` go into its TransformerConfig."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from torpor.megatron.specs import gpt_layer_spec, gpt_mtp_block_spec, hybrid_stack_spec

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    config = _config(kind, mtp, overrides)
    stage = {
        "pre_process": parallel_state.is_pipeline_first_stage(vp_stage is None, vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(vp_stage is None, vp_stage),
        "vp_stage": vp_stage,
        "share_embeddings_and_output_weights": kind.tied,
        "vocab_size": VOCAB,
        "max_sequence_length": 2 * SEQUENCE,
    }
    if kind.pattern is not None:
        pattern = "/".join([kind.pattern, *[kind.mtp_pattern] * (kind.depths if mtp else 0)])
        return HybridModel(config, hybrid_stack_spec(config), hybrid_layer_pattern=pattern, **stage).to(
            _device()
        )
    spec = gpt_layer_spec(config, vp_stage)
    mtp_spec = gpt_mtp_block_spec(config, vp_stage) if mtp else None
    return GPTModel(
        config, spec, position_embedding_type=kind.positions, mtp_block_spec=mtp_spec, **stage
    ).to(_device())


def build_pair(kind: Kind, *, seed: int = 1, **overrides: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Build a model with MTP and one built without it that has the same trunk weights."""
    with_mtp = build(kind, mtp=True, seed=seed, **overrides)
    without = build(kind, mtp=False, seed=seed + 100, **overrides)
    trunk = {n: t for n, t in with_mtp.state_dict().items() if n in without.state_dict()}
    if "output_layer.weight" in trunk and kind.tied:
        # What a tied last stage projects with is its copy of the embedding.
        trunk["output_layer.weight"] = with_mtp.embedding.word_embeddings.weight
    without.load_state_dict(trunk, strict=True)
    return with_mtp, without


def batch(seed: int = 3, size: int = 2) -> dict[str, torch.Tensor]:
    """Return the inputs of a forward: ids, positions, mask and labels of [size, SEQUENCE]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (size, SEQUENCE + 1), generator=generator)
    inputs = {
        "input_ids": ids[:, :-1],
        "position_ids": torch.arange(SEQUENCE).expand(size, -1),
        "attention_mask": torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool(),
        "labels": ids[:, 1:],
    }
    return {name: tensor.contiguous().to(_device()) for name, tensor in inputs.items()}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradient of every parameter that has one."""
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit (NaN equals NaN, -0.0 differs from 0.0)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    as_bytes = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*as_bytes)


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Return the names that only one of the two has, or whose bytes differ."""
    return sorted(_differing(left, right))


def _differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> Iterator[str]:
    yield from left.keys() ^ right.keys()
    yield from (n for n in left.keys() & right.keys() if not same_bytes(left[n], right[n]))


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _config(kind: Kind, mtp: bool, overrides: dict[str, Any]) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": len(kind.pattern.replace("|", "")) if kind.pattern else 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": kind.pattern is None,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "mtp_num_layers": kind.depths if mtp else None,
        "mtp_use_repeated_layer": mtp and kind.repeated,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "pipeline_dtype": overrides.get("params_dtype", torch.float32),
    }
    if kind.pattern:
        fields |= {
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "mamba_num_groups": 2,
            "mamba_state_dim": 8,
        }
    if kind.moe:
        fields |= {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 24,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_aux_loss_coeff": 0.0,
        }
    if overrides.get("params_dtype") is torch.bfloat16:
        fields["bf16"] = True
    return TransformerConfig(**{**fields, **overrides})
