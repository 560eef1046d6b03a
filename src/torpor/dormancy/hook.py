"""`freeze_mtp` for trainers that build and wrap the model themselves and take a hook in between."""

from collections.abc import Sequence
from typing import TypeVar

import torch

from torpor.dormancy.handle import DormantMTP, freeze_mtp

_Chunk = TypeVar("_Chunk", bound=torch.nn.Module)


class PreWrapHook:
    """Puts the MTP layers of a list of model chunks to sleep; keeps the handles.

    Attributes:
        handles: One handle for each call, in order.
    """

    def __init__(self) -> None:
        self.handles: list[DormantMTP] = []

    def __call__(self, chunks: Sequence[_Chunk]) -> list[_Chunk]:
        """Freeze the MTP layers of a model that is not wrapped yet.

        Weights may still be loaded until its first forward, in whatever way.

        Args:
            chunks: This rank's model chunks, before DDP.

        Returns:
            The same chunks.

        Raises:
            UnsupportedModelError: as `freeze_mtp` does.
        """
        handle = freeze_mtp(chunks)
        handle.renew_baseline_at_first_forward()
        self.handles.append(handle)
        return list(chunks)


def pre_wrap_hook() -> PreWrapHook:
    """Return `freeze_mtp` as a hook that is given a model's chunks before they are wrapped.

    Megatron-LM, Megatron-Bridge and what is built on it take such hooks; docs/trainers has a page for each.

    Example:
        >>> hook = torpor.pre_wrap_hook()             # doctest: +SKIP
        >>> provider.register_pre_wrap_hook(hook)     # doctest: +SKIP
        >>> model = provider.provide_distributed_model(ddp_config)  # doctest: +SKIP
        >>> hook.handles[0].check(optimizer)          # doctest: +SKIP

    Source:
        Megatron-LM, megatron/training/models/base.py, `ModelConfig.pre_wrap_hooks`; Megatron-Bridge,
        src/megatron/bridge/models/model_provider.py, `register_pre_wrap_hook`.
    """
    return PreWrapHook()
