"""The launcher itself: results by rank, the first failure's own traceback, no rank left behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks.launch import RankFailedError, run_ranks


def sum_of_ranks(scale: int) -> tuple[int, int, int]:
    total = torch.tensor([scale * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), int(total), torch.get_num_threads()


def fail_on_rank_1(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("the fault is here")
    dist.barrier()  # never passed


def sleep_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def test_returns_every_ranks_result_in_order() -> None:
    assert run_ranks(sum_of_ranks, 2, 10) == [(0, 30, 1), (1, 30, 1)]


def test_first_failure_is_reported_and_the_others_are_killed(tmp_path) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed(?s:.*)ValueError: the fault is here"):
        run_ranks(fail_on_rank_1, 2, str(tmp_path))
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_stuck_rank_is_killed_and_says_where_it_stood() -> None:
    with pytest.raises(RankFailedError, match=r"ranks \[0(, 1)?\] of 2 did not finish(?s:.*)sleep_on_rank_0"):
        run_ranks(sleep_on_rank_0, 2, timeout=5)


def return_a_tensor() -> torch.Tensor:
    return torch.nn.Parameter(torch.arange(3.0))


def test_a_returned_tensor_does_not_bring_megatron_along() -> None:
    """The process that starts the ranks may still want to prepare its own host."""
    code = (
        "import sys; from ranks.launch import run_ranks; from test_launch import return_a_tensor\n"
        "print(run_ranks(return_a_tensor, 1)[0].tolist(), 'megatron.core' in sys.modules)"
    )
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")])
    printed = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert printed.stdout.strip() == "[0.0, 1.0, 2.0] False", printed.stderr
