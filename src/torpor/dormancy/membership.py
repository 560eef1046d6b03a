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
    tensors = list(_tensors_in(optimizer, set()))
    return {id(t) for t in tensors}, {_storage(t) for t in tensors} - {0}


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0  # a wrapper subclass such as DTensor has none of its own


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield every tensor in containers and optimizers, at any depth.

    Besides `param_groups` and `state` Megatron's optimizers (megatron/core/optimizer) keep model parameters
    in lists of groups, in maps from and to their FP32 and CPU copies, and in optimizers that they drive
    (ChainedOptimizer, HybridDeviceOptimizer): all attributes are looked through, so that none is missed.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = [*value, *value.values()]
    elif isinstance(value, list | tuple | set):
        items = value
    elif _is_optimizer(value):
        items = vars(value).values()
    if items and id(value) not in seen:
        seen.add(id(value))
        for item in items:
            yield from _tensors_in(item, seen)


def _is_optimizer(value: Any) -> bool:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    return isinstance(value, torch.optim.Optimizer | MegatronOptimizer)
