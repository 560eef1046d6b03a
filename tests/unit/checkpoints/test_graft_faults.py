"""A graft that cannot finish: killed at any write, disk full, output that cannot be written."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from golden_folders import write_golden
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.graft import graft_folder
from torpor.checkpoints.verify import verify_folders
from torpor.errors import CheckpointError

# Kills a forked graft before its first call that changes the disk, then another before its second, and so on;
# after each, looks at what is there.
KILL_EVERYWHERE = """
import hashlib, os, shutil, signal, sys
from pathlib import Path
from torpor.checkpoints.families import check_heads
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.graft import graft_folder

source, tuned, out = map(Path, sys.argv[1:])
CHANGES = set("write copy_file_range fsync link rename mkdir ioctl unlink truncate open rmdir".split())

def fingerprint(path):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}

before = fingerprint(source), fingerprint(tuned)
kills = complete = 0
while True:
    child = os.fork()
    if not child:
        seen = 0
        def watch(frame, event, function):
            global seen
            if event == "c_call" and function.__name__ in CHANGES:
                if seen == kills:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1
        sys.setprofile(watch)
        graft_folder(source, tuned, out)
        sys.setprofile(None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert (fingerprint(source), fingerprint(tuned)) == before, kills
    if out.exists():
        check_heads(open_folder(out))
        complete += 1
        shutil.rmtree(out)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, status
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    kills += 1
graft_folder(source, tuned, out)
print(kills, complete)
"""


@pytest.fixture
def pair(tmp_path):
    """A source with copies, and a folder tuned from it without heads."""
    return (
        write_golden(tmp_path / "source", "longcat_flash"),
        write_golden(tmp_path / "tuned", "longcat_flash", seed=1, heads=False),
    )


def test_killed_at_every_write(pair, tmp_path):
    """The final name holds a whole folder or nothing, the others are untouched, the next run cleans up."""
    source, tuned = pair
    done = subprocess.run(
        [sys.executable, "-c", KILL_EVERYWHERE, str(source), str(tuned), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kills, complete = map(int, done.stdout.split())
    assert kills > 30
    # Killed after the rename, at the last syncs, the folder is there and sound.
    assert 1 <= complete < 6
    assert {file.name for file in tmp_path.iterdir()} == {"source", "tuned", "out"}
    assert verify_folders(source, tmp_path / "out").ok


@pytest.mark.parametrize("limit", [0, 1000, 20_000])
def test_full_disk(pair, tmp_path, limit):
    """One message that says what the system said, exit 2, and no folder."""
    source, tuned = pair

    def shrink():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "torpor", "graft"]
    done = subprocess.run(
        [*command, "--heads", source, "--trunk", tuned, "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        preexec_fn=shrink,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    assert done.returncode == 2, done
    assert "could not be written: [Errno 27] File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"source", "tuned"}


@pytest.mark.parametrize("parent", ["/proc", "/proc/self"])
def test_output_that_cannot_be_written(pair, parent):
    """Where no folder can be made there is one message, too."""
    source, tuned = pair
    with pytest.raises(CheckpointError, match="could not be written"):
        graft_folder(source, tuned, Path(parent) / "torpor-out")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_read_only_output(pair, tmp_path):
    """A folder that may not be written into."""
    source, tuned = pair
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    with pytest.raises(CheckpointError, match="could not be written"):
        graft_folder(source, tuned, closed / "out")


def test_trunk_that_changes_under_our_hands(pair, tmp_path):
    """A source that is truncated while it is read gives an error, and no folder."""
    source, tuned = pair

    def spoil(done, total):
        file = source / "model.safetensors"
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size // 4)

    with pytest.raises(CheckpointError, match="before the end of"):
        graft_folder(source, tuned, tmp_path / "out", spoil)
    assert {file.name for file in tmp_path.iterdir()} == {"source", "tuned"}
    open_folder(tuned)
