"""Casts of a sleeping model, as Float16Module makes them: what they may change in retained tensors.

Megatron-LM and Megatron-Bridge wrap a model in Float16Module after the hooks that run before DDP, and that
casts every floating tensor. Parameters follow, as they would awake; a cast that loses no bit (weights that
came from a checkpoint of that dtype) leaves the proof valid, any other is a change that `check` reports.
Buffers stay as they are: the only ones that MTP layers hold are their routers', which Megatron keeps in
float32 and whose forward mends the cast (transformer/moe/router.py, `_maintain_float32_expert_bias`);
asleep, no forward would.
"""

from collections.abc import Callable
from typing import Any

import torch


class ApplyToRetained:
    """Stands in for the `_apply` of an MTP block: `to`, `cuda`, `bfloat16` and the like end up there."""

    def __init__(
        self, mtp: torch.nn.Module, follow: Callable[[str, torch.Tensor, torch.Tensor], None]
    ) -> None:
        self.mtp = mtp
        self.follow = follow

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Apply a function to the block's tensors; keep buffers from casts and report those without loss."""
        parameters = {name: parameter.data for name, parameter in self.mtp.named_parameters()}
        buffers = dict(self.mtp.named_buffers())
        type(self.mtp)._apply(self.mtp, function, recurse)
        for name, buffer in buffers.items():
            owner_name, _, attribute = name.rpartition(".")
            owner = self.mtp.get_submodule(owner_name)
            applied = owner.get_buffer(attribute)
            if applied.dtype != buffer.dtype:
                owner._buffers[attribute] = buffer.to(applied.device)
        for name, parameter in self.mtp.named_parameters():
            before, after = parameters[name], parameter.data
            if after.dtype != before.dtype and _same_bits(after.to(before), before):
                self.follow(name, before, after)
        return self.mtp


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*as_bytes)
