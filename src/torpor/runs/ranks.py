"""What the ranks of a run tell each other beside training: rank 0's results, and each other's errors."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from torpor.errors import TorporError
from torpor.megatron import parallel

# Tokenizing and exporting may take rank 0 longer than a training step may ever wait.
_RANK_0_MAY_TAKE = timedelta(days=14)


class Ranks:
    """All ranks of a run. Made on every rank, with the world in place."""

    def __init__(self) -> None:
        self.rank = parallel.global_rank()
        self.size = parallel.world_size()
        self._group = (
            torch.distributed.new_group(backend="gloo", timeout=_RANK_0_MAY_TAKE) if self.size > 1 else None
        )

    def from_rank_0[T](self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result on every rank; its error is raised on every rank."""
        result: list[Any] = [None, None]
        original: Exception | None = None
        if self.rank == 0:
            result[0], original = _attempt(action)
            result[1] = _carried(original, 0)
        if self.size > 1:
            torch.distributed.broadcast_object_list(result, src=0, group=self._group)
        _raise_alike(original, result[1])
        return result[0]

    def gather[T](self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return all results; the first rank's error is raised on every rank.

        Args:
            action: something without collective calls, which a rank that fails would leave the others in.
        """
        result, original = _attempt(action)
        mine = (result, _carried(original, self.rank))
        everyone: list[Any] = [mine]
        if self.size > 1:
            everyone = [None] * self.size
            torch.distributed.all_gather_object(everyone, mine, group=self._group)
        for rank, (_, error) in enumerate(everyone):
            if error is not None:
                _raise_alike(original if rank == self.rank else None, error)
        return [value for value, _ in everyone]


def _attempt[T](action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _carried(error: Exception | None, rank: int) -> tuple[type[TorporError], str] | None:
    """An error in a form that other ranks can raise too."""
    if error is None:
        return None
    if isinstance(error, TorporError):
        return type(error), str(error)
    return TorporError, f"rank {rank} failed: {type(error).__name__}: {error}"


def _raise_alike(original: Exception | None, carried: tuple[type[TorporError], str] | None) -> None:
    """Raise an error that every rank raises now, in its original form where it comes from."""
    if carried is None:
        return
    kind, message = carried
    error = original if original is not None else kind(message)
    if isinstance(error, TorporError):
        error.is_on_every_rank = True
    raise error
