"""The zig-zag layout is Megatron's."""

import pytest
import torch
from megatron.core.utils import get_batch_on_this_cp_rank

from torpor.errors import ConfigError
from torpor.megatron.zigzag import zigzag_places


class Group:
    """As much of a process group as Megatron asks for."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_places_are_those_of_megatrons_batches(monkeypatch, size: int) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank())
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size())
    row = torch.arange(24)
    for rank, places in enumerate(zigzag_places([(0, 24)], size)):
        batch = {"tokens": row[None], "cu_seqlens": None}
        own = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=Group(rank, size))
        assert torch.equal(own["tokens"][0], row[places])


def test_each_sample_is_divided_by_itself() -> None:
    """Every rank has the same share of every sample; together they have everything once."""
    places_RS = zigzag_places([(0, 8), (8, 12)], 2)
    assert places_RS.tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert places_RS.flatten().sort().values.tolist() == list(range(12))


def test_refuses_samples_that_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match="a sample of 6 tokens cannot be cut into 4 equal chunks"):
        zigzag_places([(0, 8), (8, 14)], 2)
