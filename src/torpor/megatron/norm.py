"""The norm of the local specs: PyTorch's own, built the way Megatron's layer specs build norms."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from torpor.errors import UnsupportedModelError
from torpor.megatron.host import CPU, current_device


class LocalNorm:
    """Builds `torch.nn.RMSNorm` or `torch.nn.LayerNorm`, as the configuration says.

    Unlike Megatron's own `WrappedTorchNorm` (transformer/torch_norm.py) it serves sequence parallelism: its
    parameters see a part of the sequence on each rank, and the tag has their gradients summed over the ranks.
    """

    def __new__(  # type: ignore[misc]  # a layer spec calls the class to get a norm
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        """Build a norm.

        Args:
            config: Says which norm, in which dtype, and whether the sequence is divided.
            hidden_size: Length of the last axis.
            eps: Added to the mean square.
            _: What layer specs tell norms that can use it, such as `has_residual`.

        Raises:
            UnsupportedModelError: The configuration asks for a norm that only Transformer Engine has.
        """
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        if config.normalization not in kinds:
            raise UnsupportedModelError(
                f"normalization is {config.normalization!r}: without Transformer Engine it has to be one of "
                f"{', '.join(kinds)}"
            )
        if config.layernorm_zero_centered_gamma:
            raise UnsupportedModelError(
                "layernorm_zero_centered_gamma is on: a norm whose weight is stored as a distance from one "
                "needs Transformer Engine\n  Install transformer-engine on a CUDA machine to use this model."
            )
        norm = kinds[config.normalization](
            hidden_size,
            eps=eps,
            dtype=config.params_dtype,
            device=CPU if config.use_cpu_initialization else current_device(),
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
