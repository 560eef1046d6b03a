"""What every test shares: one thread, no accelerator unless a test asks for it, fixtures for Megatron."""

import os

# Before anything imports torch: tests are small and run beside each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# gloo resolves the host's own name otherwise, which not every machine can.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none, and mark what starts several processes."""
    for item in items:
        folders = item.path.parts
        if "gpu" in folders:
            item.add_marker(pytest.mark.gpu)
        if "ranks" in folders:
            item.add_marker(pytest.mark.ranks)
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(skip)


@pytest.fixture
def megatron_rank() -> Iterator[None]:
    """A world of one rank with Megatron's process groups, generators seeded with 1234."""
    from torpor.megatron import parallel

    parallel.initialize(parallel.Layout(), seed=1234)
    try:
        yield
    finally:
        parallel.shutdown()
