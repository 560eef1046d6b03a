"""Routing replay without MTP's routers: while they sleep they record and replay nothing.

Megatron keeps the recorders of all routers of a process in one list and tells layers apart by the place in it
(transformer/moe/router_replay.py). A trainer that replays the routes of a rollout gives one tensor for each
layer that ran; with sleeping MTP routers in the list lengths disagree, or a route goes to the wrong layer.
"""

from collections.abc import Iterable
from typing import Any

import torch


class ReplayWithoutMTP:
    """Keeps the recorders of some routers off Megatron's list, and knows where they were."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        recorders = [recorder for m in modules if (recorder := getattr(m, "router_replay", None)) is not None]
        listed = _listed()
        # Each with those that stand before it: others may come and go meanwhile.
        self._taken = [(r, listed[: listed.index(r)]) for r in recorders if r in listed]
        for recorder, _ in self._taken:
            listed.remove(recorder)

    def put_back(self) -> None:
        """Put the recorders back where they were, in order."""
        listed = _listed()
        for recorder, before in self._taken:
            places = [listed.index(other) for other in before if other in listed]
            listed.insert(max(places, default=-1) + 1, recorder)


def _listed() -> list[Any]:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    listed: list[Any] = RouterReplay.global_router_replay_instances
    return listed
