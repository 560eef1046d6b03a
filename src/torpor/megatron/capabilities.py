"""What the installed Megatron-Core and its optional kernels can do: the one place that asks them."""

import functools
import importlib.util

from torpor.megatron.host import is_cpu_host


def _is_installed(package: str) -> bool:
    """Say whether a top-level package can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


@functools.cache
def has_transformer_engine() -> bool:
    """Say whether Transformer Engine is installed and has a CUDA device to run on."""
    if is_cpu_host() or not _is_installed("transformer_engine"):
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE  # installed, but does it load?

    return bool(HAVE_TE)


def uses_transformer_engine(transformer_impl: str) -> bool:
    """Say whether a model whose TransformerConfig has this `transformer_impl` is built of its layers here."""
    return transformer_impl != "local" and has_transformer_engine()


@functools.cache
def has_mamba_ssm() -> bool:
    """Say whether Megatron's Mamba mixer has its kernels, and a CUDA device to run them on."""
    if is_cpu_host() or not _is_installed("mamba_ssm"):
        return False
    from megatron.core.ssm.mamba_mixer import HAVE_EINOPS, HAVE_MAMBA_SSM

    return bool(HAVE_MAMBA_SSM and HAVE_EINOPS)


def has_block_quantization() -> bool:
    """Say whether Model-Optimizer can fake-quantise block by block here, as NVFP4 does: on CUDA only.

    Source:
        modelopt/torch/quantization/tensor_quant.py, `_dynamic_block_quantize_impl`.
    """
    return not is_cpu_host()


def fused_kernels(*, swiglu: bool, rotary: bool) -> dict[str, bool]:
    """Return the fields of a TransformerConfig that turn on the fused kernels there are here.

    Megatron compiles those of activation and residual itself, for CUDA. Rotary embeddings are fused by
    Transformer Engine.

    Args:
        swiglu: Whether the model's MLPs are gated by SiLU.
        rotary: Whether its positions are rotary embeddings.
    """
    if is_cpu_host():
        return {}
    from megatron.core.models.common.embeddings import rope_utils

    return {
        "bias_activation_fusion": swiglu,
        "bias_dropout_fusion": True,
        "apply_rope_fusion": rotary and rope_utils.fused_apply_rotary_pos_emb is not None,
    }
