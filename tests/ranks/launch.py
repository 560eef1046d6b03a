"""Runs a test function on several ranks: fresh Python processes, gloo, a rendezvous through a file.

def check(scale):                       # top level of a test module; runs on every rank
    return scale * torch.distributed.get_rank()

def test_check():
    assert run_ranks(check, 2, 10) == [0, 10]
"""

import datetime
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_SECONDS = 240


class RankFailedError(AssertionError):
    """A rank raised, died or did not finish; the message holds what it printed and its traceback."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300) -> list[Any]:
    """Run `function(*args)` on every rank of a fresh world and return what each rank returned.

    Each rank has prepared the host and joined the process group before the module of `function` is imported,
    and runs one thread. The function may build and shut down layouts (torpor.megatron.parallel) one after the
    other: the process group stays. When one rank fails, the others are killed.

    Args:
        function: A function at the top level of a module that the ranks can import.
        world_size: Number of ranks.
        args: Arguments, the same on each rank; they are pickled, and so is the result.
        timeout: Seconds that the function may take, once all ranks have started, until they are killed.

    Returns:
        The results, ordered by rank.

    Raises:
        RankFailedError: A rank failed, or the time ran out.
    """
    with tempfile.TemporaryDirectory(prefix="torpor-ranks-") as name:
        folder = Path(name)
        # The arguments apart: their classes can be found once the path is set.
        call = (list(sys.path), function.__module__, function.__qualname__, pickle.dumps(args))
        (folder / "call.pickle").write_bytes(pickle.dumps(call))
        ranks = [_start(folder, rank, world_size) for rank in range(world_size)]
        try:
            _wait(ranks, folder, timeout)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                rank.wait()
        import torch

        # Not pickle: Megatron-Core makes pickled tensors refer to itself, and would be imported here.
        results = [folder / f"result_{rank}.pt" for rank in range(world_size)]
        return [torch.load(path, weights_only=False) for path in results]


def _start(folder: Path, rank: int, world_size: int) -> subprocess.Popen[bytes]:
    """Start one rank, with what it prints going to a file."""
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    with (folder / f"output_{rank}.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    """Return when every rank has finished well; raise as soon as one has not."""
    # Importing Megatron takes a few seconds, and many times that on a machine with other work.
    deadline = time.monotonic() + START_SECONDS
    starting = True
    while True:
        if starting and all((folder / f"started_{index}").exists() for index in range(len(ranks))):
            starting = False
            deadline = time.monotonic() + timeout
        codes = [rank.poll() for rank in ranks]
        failed = [index for index, code in enumerate(codes) if code]
        if failed:
            # The rank that fails first takes others with it, and they may be seen first.
            _wait_for_any([folder / f"error_{index}.txt" for index in range(len(ranks))], seconds=2)
            first = min(range(len(ranks)), key=lambda index: _written(folder / f"error_{index}.txt"))
            raise RankFailedError(
                f"rank {first} of {len(ranks)} failed\n{_report(folder, first, codes[first])}"
            )
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            stuck = [index for index, code in enumerate(codes) if code is None]
            for index in stuck:
                ranks[index].send_signal(signal.SIGUSR1)  # has the rank print where it is
            time.sleep(0.5)
            reports = "\n".join(_report(folder, index, None) for index in stuck)
            what = f"start in {START_SECONDS}" if starting else f"finish in {timeout}"
            raise RankFailedError(f"ranks {stuck} of {len(ranks)} did not {what} s\n{reports}")
        time.sleep(0.02)


def _wait_for_any(paths: list[Path], seconds: float) -> None:
    """Wait until one of the files is there, but not longer than so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not any(path.exists() for path in paths):
        time.sleep(0.02)


def _written(path: Path) -> int:
    """Return when a file was written, in nanoseconds, or the end of time for one that was not."""
    return path.stat().st_mtime_ns if path.exists() else sys.maxsize


def _report(folder: Path, rank: int, code: int | None) -> str:
    """Return what a rank has left behind: its traceback, and the end of what it printed."""
    error = folder / f"error_{rank}.txt"
    parts = [error.read_text()] if error.exists() else [f"exit code {code}\n"]
    output = (folder / f"output_{rank}.txt").read_text(errors="replace")[-6000:]
    if output.strip():
        parts.append(f"--- printed by rank {rank} ---\n{output}")
    return "".join(parts)


def _run_rank(folder: Path) -> None:
    """Be one rank: join the others, call the function, leave the result."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        path, module, name, args = pickle.loads((folder / "call.pickle").read_bytes())
        sys.path[:] = path

        from importlib import import_module

        import torch

        from torpor.megatron.host import prepare_host

        torch.set_num_threads(1)
        prepare_host()
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(minutes=5),
        )
        (folder / f"started_{rank}").touch()
        function = import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        torch.save(function(*pickle.loads(args)), folder / f"result_{rank}.pt")
        torch.distributed.destroy_process_group()
    except BaseException:
        partial = folder / f"error_{rank}.partial"
        partial.write_text(traceback.format_exc())
        partial.rename(folder / f"error_{rank}.txt")
        # Without waiting for a process group whose other ranks may be stuck in a collective.
        os._exit(1)


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]))
