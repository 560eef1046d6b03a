"""Layouts against worlds, the start of a world, and the errors of both."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torpor.errors import ConfigError
from torpor.megatron import parallel
from torpor.megatron.host import is_cpu_host
from torpor.megatron.parallel import Layout


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch, no_process_groups):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("layout", "world", "data"),
    [
        (Layout(), 1, 1),
        (Layout(), 6, 6),
        (Layout(tensor=2, sequence_parallel=True), 2, 1),
        (Layout(tensor=2, pipeline=2), 8, 2),
        (Layout(expert=2), 4, 4),
        (Layout(tensor=2, expert=2), 4, 2),
        (Layout(context=2, pipeline=2), 8, 2),
        (Layout(context=2, expert=4), 4, 2),
    ],
)
def test_what_is_left_of_a_world_is_data_parallel(layout: Layout, world: int, data: int) -> None:
    assert layout.data(world) == data


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        (Layout(tensor=2), 1, r"1 ranks cannot be divided by tensor 2 x pipeline 1 = 2"),
        (Layout(tensor=2, pipeline=3), 4, r"4 ranks cannot be divided by tensor 2 x pipeline 3 = 6"),
        (Layout(expert=3), 4, r"4 ranks cannot be divided by .* x expert 3 = 3"),
        (Layout(tensor=2, expert=2), 6, r"over the 3 data parallel ranks"),
        (Layout(context=4), 2, r"2 ranks cannot be divided by tensor 1 x pipeline 1 x context 4 = 4"),
        (Layout(context=2, expert=3), 4, r"over the 4 data and context parallel ranks"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout: Layout, world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout.data(world)


@pytest.mark.parametrize("size", [0, -1, 1.0, "2", True, None])
@pytest.mark.parametrize("name", ["tensor", "pipeline", "expert", "context"])
def test_sizes_are_whole_numbers_from_one(name: str, size) -> None:
    with pytest.raises(ConfigError, match=f"{name} parallel size is {size!r}"):
        Layout(**{name: size})


def test_sequence_parallelism_needs_tensor_parallelism() -> None:
    with pytest.raises(ConfigError, match="tensor parallel size 1"):
        Layout(sequence_parallel=True)


def test_a_world_of_one_starts_and_ends_without_torchrun() -> None:
    from megatron.core import parallel_state

    before = set(os.environ)
    for _ in range(2):  # again after the end of the first
        device = parallel.initialize(Layout(), seed=3)
        assert (parallel.global_rank(), parallel.world_size()) == (0, 1)
        assert parallel.is_first_stage()
        assert parallel.is_last_stage()
        assert device == torch.device("cpu") or device.type == "cuda"
        first = torch.randn(3)
        parallel.shutdown()
        assert not dist.is_initialized()
        assert not parallel_state.model_parallel_is_initialized()
    parallel.shutdown()  # nothing to end
    parallel.initialize(Layout(), seed=3)
    assert torch.equal(first, torch.randn(3))
    parallel.shutdown()
    assert set(os.environ) == before


def test_a_process_group_that_exists_is_used_and_left(tmp_path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel.initialize(Layout(), seed=3)
        parallel.shutdown()
        assert dist.is_initialized()
        with pytest.raises(ConfigError):
            parallel.initialize(Layout(tensor=2), seed=3)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_the_threads_of_a_layout_end_with_it(tmp_path) -> None:
    """Each process group polls in threads of its own; those of a layout go although the world stays."""

    def count_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    if not Path("/proc/self/task").exists():
        pytest.skip("threads are counted in /proc")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before = count_threads()
        for _ in range(2):
            parallel.initialize(Layout(), seed=3)
            assert count_threads() > before + 20 or not is_cpu_host()
            parallel.shutdown()
            assert count_threads() < before + 10
    finally:
        dist.destroy_process_group()


def test_a_refused_layout_leaves_no_process_group() -> None:
    with pytest.raises(ConfigError, match="1 ranks cannot be divided"):
        parallel.initialize(Layout(pipeline=2), seed=3)
    assert not dist.is_initialized()


def test_a_second_layout_needs_the_end_of_the_first() -> None:
    parallel.initialize(Layout(), seed=3)
    try:
        with pytest.raises(ConfigError, match="shutdown"):
            parallel.initialize(Layout(), seed=3)
        assert dist.is_initialized()
    finally:
        parallel.shutdown()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "has RANK but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE but not RANK"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one' and WORLD_SIZE is '2'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "ranks count from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
    ],
)
def test_an_incomplete_environment_is_refused(monkeypatch, environment, message) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        parallel.start_processes()
    assert not dist.is_initialized()


def test_rank_and_world_size_come_together() -> None:
    with pytest.raises(ConfigError, match="give both or neither"):
        parallel.start_processes(rank=0)
