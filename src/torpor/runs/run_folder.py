"""The folder of a run: made on rank 0, held against other processes, taken away again if no step is made."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torpor.errors import ConfigError
from torpor.megatron import checkpointing
from torpor.runs.ranks import Ranks
from torpor.training.config import RunConfig


def check_output(config: RunConfig) -> Path | None:
    """Check that a run folder is new, or that it holds a run; nothing is written.

    Args:
        config: says which folder.

    Returns:
        The checkpoint to continue from, None for a run without one.

    Raises:
        ConfigError: the folder holds something else, or a run of another command.
        CheckpointError: its newest checkpoint is not whole.
    """
    output = config.output
    if output.exists() and not output.is_dir():
        raise ConfigError(f"`output`: {output} is a file\n  Give the path of a folder.")
    # run.partial is what a kill leaves of the first file that a run writes.
    if not output.exists() or all(path.name == "run.partial" for path in output.iterdir()):
        return None
    if not (output / "run.json").is_file():
        raise ConfigError(
            f"`output`: {output} is not empty and holds no run of `torpor {config.command}`\n"
            "  Give a new folder; nothing is overwritten."
        )
    _check_command(config)
    return checkpointing.find_latest(output / "checkpoints")


def _check_command(config: RunConfig) -> None:
    record = config.output / "run.json"
    try:
        command = json.loads(record.read_text(encoding="utf-8"))["command"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{record} does not say of which command the run is: {error!r}\n  Give a new folder."
        ) from None
    if command != config.command:
        raise ConfigError(
            f"`output`: {config.output} holds a run of `torpor {command}`, and this is `torpor "
            f"{config.command}`\n  Give a new folder."
        )


class RunFolder:
    """What a new run puts on disk before its first step, to be taken away again if there is none."""

    def __init__(self, output: Path):
        self._output = output
        self._made_parents = [path for path in (output, *output.parents) if not path.exists()]
        self._is_kept = False

    def keep(self) -> None:
        """From here on the folder holds something to continue from."""
        self._is_kept = True

    def remove(self) -> None:
        """Take away what was made, unless it is to be kept; the folder was missing or empty before."""
        if self._is_kept or not self._output.exists():
            return
        for path in self._output.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with suppress(OSError):  # somebody else has put something beside it: theirs stays
            for path in self._made_parents:
                path.rmdir()


@contextmanager
def open_run_folder(config: RunConfig, ranks: Ranks) -> Iterator[RunFolder]:
    """Make the run folder on rank 0 and hold it; an error before `keep` removes whatever was made.

    Args:
        config: says where, and is written down in it.
        ranks: all ranks, each of which calls this.

    Raises:
        ConfigError: the folder cannot be written, or another process is running in it.
    """
    folder = RunFolder(config.output)
    if ranks.rank != 0 or (config.output / "run.json").exists():
        folder.keep()
    try:
        with ExitStack() as lock:
            ranks.from_rank_0(lambda: _make_run_folder(config, folder, lock))
            yield folder
    except BaseException:
        folder.remove()
        raise


def _make_run_folder(config: RunConfig, folder: RunFolder, lock: ExitStack) -> None:
    """Make the folder and hold it against other processes for as long as `lock` is open."""
    record = config.output / "run.json"
    try:
        config.output.mkdir(parents=True, exist_ok=True)
        # First of all: it tells a later start that the folder is a run's.
        if not record.exists():
            write_json(record, {"command": config.command, **config.model_dump(mode="json")})
        # For writing: NFS grants exclusive locks to no other.
        file = lock.enter_context(record.open("r+b"))
    except OSError as error:
        raise ConfigError(
            f"`output`: {config.output} cannot be written: {error.strerror or error}\n"
            "  Give a folder that can."
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        folder.keep()  # it is the other process's
        raise ConfigError(
            f"`output`: another process is running in {config.output}\n"
            "  Wait for it to end, or give another folder."
        ) from None
    except OSError:  # a file system without locks, such as Lustre mounted without them: nobody is held off
        pass
    (config.output / "tokens").mkdir(exist_ok=True)


def write_json(path: Path, values: Any) -> None:
    """Write a file of a run folder, whole or not at all."""
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)
