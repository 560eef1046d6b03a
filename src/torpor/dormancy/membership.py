"""Whether a parameter has got into a gradient, a DDP buffer or an optimizer."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torpor.errors import MTPTrainedError


def check_untrained(parameters: Iterable[tuple[str, torch.nn.Parameter]], optimizer: Any = None) -> None:
    """Check that no parameter is trainable, has a gradient, or is known to DDP or the optimizer.

    Args:
        parameters: Named retained parameters.
        optimizer: A torch or Megatron-Core optimizer, chained and distributed ones included; None skips it.

    Raises:
        MTPTrainedError: naming the parameter and what holds it.
    """
    ids, storages = _held_by(optimizer)
    for name, parameter in parameters:
        held = _holder(parameter)
        if held is None and id(parameter) in ids:
            held = "it is in the optimizer's parameter groups"
        if held is None and _storage(parameter) in storages:
            held = "the optimizer holds a view of its storage"
        if held is not None:
            raise MTPTrainedError(
                f"{name} is retained but {held}\n"
                "  Call freeze_mtp before DDP and the optimizer are built, and do not unfreeze what it froze."
            )


def _holder(parameter: torch.nn.Parameter) -> str | None:
    if parameter.requires_grad:
        return "it requires a gradient"
    if parameter.grad is not None:
        return "it has a gradient"
    if hasattr(parameter, "main_grad"):
        return "it has a main_grad in a DDP buffer"
    if hasattr(parameter, "main_param"):
        return "it has an FP32 main_param in an optimizer"
    return None


def _held_by(optimizer: Any) -> tuple[set[int], set[int]]:
    tensors = list(_optimizer_tensors(optimizer))
    return {id(t) for t in tensors}, {_storage(t) for t in tensors} - {0}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield every parameter that an optimizer, or one inside it, knows.

    Megatron's optimizers (megatron/core/optimizer/{optimizer,distrib_optimizer}.py) keep model parameters
    in `*_groups` lists and in `model_param_gbuf_map`, beside the torch optimizer's own `param_groups`.
    """
    if optimizer is None:
        return
    if hasattr(optimizer, "chained_optimizers"):
        # A chain of several refuses `.optimizer`, and has no parameters of its own.
        for inner in optimizer.chained_optimizers:
            yield from _optimizer_tensors(inner)
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        yield from _optimizer_tensors(getattr(optimizer, "optimizer", None))
    else:
        for group in optimizer.param_groups:
            yield from group["params"]
        yield from (key for key in optimizer.state if isinstance(key, torch.Tensor))
    yield from getattr(optimizer, "model_param_gbuf_map", ())
    for name, groups in vars(optimizer).items():
        if name.endswith("_groups") and name != "param_groups" and isinstance(groups, list):
            for group in groups:
                if isinstance(group, list):
                    yield from (t for t in group if isinstance(t, torch.Tensor))
