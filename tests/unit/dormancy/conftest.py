"""A world of one rank for every test of dormancy, and quick searches for optimizers."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _imports_are_not_searched() -> Iterator[None]:
    """freeze_mtp looks for optimizers among all objects there are: here not among those of modules."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@pytest.fixture(autouse=True)
def _world(megatron_rank: None) -> None:
    """Every test here builds models."""
