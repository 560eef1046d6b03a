"""A written folder exists complete or not at all, and other readers read it."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import tiny
from raw_folders import write_folder
from torpor.checkpoints import folder as folder_module
from torpor.checkpoints.folder import FolderWriter, open_folder
from torpor.errors import CheckpointError


def copy_all(source, out, **options):
    with FolderWriter(out, like=source, **options) as writer:
        for name in source.tensors:
            writer.copy(source, name)
    return open_folder(out)


def assert_same_tensors(one, other):
    assert set(one.tensors) == set(other.tensors)
    for name, entry in one.tensors.items():
        copied = other.tensors[name]
        assert (copied.dtype, copied.shape) == (entry.dtype, entry.shape)
        assert other.read_bytes(name) == one.read_bytes(name), name


@pytest.fixture
def like(tmp_path):
    return open_folder(write_folder(tmp_path / "like", {"model.safetensors": {"a": ("U8", [4], b"aaaa")}}))


@pytest.mark.parametrize("max_shard_bytes", [2**30, 20_000, 1])
def test_copied_folder(nemotron_h, tmp_path, max_shard_bytes):
    """Every tensor, the configuration's bytes and the companions arrive, in as many shards as asked for."""
    source = open_folder(nemotron_h)
    export = copy_all(source, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    assert_same_tensors(source, export)
    assert export.config_bytes == source.config_bytes
    assert [file.read_bytes() for file in export.companions] == [f.read_bytes() for f in source.companions]
    shards = sorted(export.path.glob("*.safetensors"))
    assert (len(shards) == 1) == (max_shard_bytes == 2**30)
    for file in shards:
        held = [e.nbytes for e in export.tensors.values() if e.file == file]
        assert sum(held) <= max_shard_bytes or len(held) == 1
    assert (export.path.stat().st_mode & 0o777) == (tmp_path.stat().st_mode & 0o777) | 0o055


def test_other_readers_read_it(nemotron_h, tmp_path):
    """Transformers loads the folder, and gives the logits of the original."""
    copy_all(open_folder(nemotron_h), tmp_path / "out", max_shard_bytes=50_000)
    tokens = torch.arange(12)[None]
    before, after = tiny.load_reference(nemotron_h), tiny.load_reference(tmp_path / "out")
    assert torch.equal(before(tokens).logits, after(tokens).logits)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.data())
def test_any_tensors_survive(tmp_path_factory, data):
    """Any mixture of dtypes, shapes and names is read back by safetensors itself, aligned for mapping."""
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn]
    names = data.draw(st.lists(st.text("abc.é_", min_size=1), min_size=1, max_size=12, unique=True))
    tensors = {}
    for name in names:
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        dtype = data.draw(st.sampled_from(dtypes))
        tensors[name] = torch.randint(0, 2, shape).to(dtype)
    out = tmp_path_factory.mktemp("any") / "out"
    size = data.draw(st.sampled_from([1, 30, 2**20]))
    with FolderWriter(out, config={"a": 1}, max_shard_bytes=size) as writer:
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor)
    read = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].double(), tensor.double())
    assert open_folder(out).tensors.keys() == tensors.keys()
    for entry in open_folder(out).tensors.values():
        assert entry.nbytes == 0 or entry.offset % tensors[entry.name].element_size() == 0


def test_header_that_outgrows_its_room(tmp_path, monkeypatch):
    """More or longer names than expected begin another shard; one very long name fits all the same."""
    monkeypatch.setattr(folder_module, "MIN_HEADER_ROOM", 128)
    names = [f"tensor.{i}" for i in range(20)] + ["long" * 500]
    with FolderWriter(tmp_path / "out", config={}) as writer:
        for name in names:
            writer.add(name, "U8", (1,), name[-1:].encode())
    folder = open_folder(tmp_path / "out")
    assert {name: bytes(folder.read_bytes(name)) for name in names} == {n: n[-1:].encode() for n in names}
    assert len(list(folder.path.glob("*.safetensors"))) > 5


def test_tensor_is_cast(like, tmp_path):
    """A tensor can be written in another dtype, strided or scalar or on the graph."""
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    with FolderWriter(tmp_path / "out", like=like) as writer:
        writer.add_tensor("cast", value, dtype="BF16")
        writer.add_tensor("strided", value.t())
        writer.add_tensor("scalar", value[1, 1])
    export = open_folder(tmp_path / "out")
    assert export.tensors["cast"].dtype == "BF16"
    assert torch.equal(export.read_tensor("strided"), torch.tensor([[1.0, 3.0], [2.0, 4.0]]))
    assert torch.equal(export.read_tensor("scalar"), torch.tensor(4.0))


def test_dtype_without_a_word(like, tmp_path):
    """A quantised tensor of PyTorch's own has no place in a folder."""
    with FolderWriter(tmp_path / "out", like=like) as writer:
        writer.copy(like, "a")
        with pytest.raises(CheckpointError, match=r"x is torch\.complex128"):
            writer.add_tensor("x", torch.zeros(1, dtype=torch.complex128))


def test_other_config(like, tmp_path):
    """A configuration can be given, and companions with it."""
    (tmp_path / "tokenizer.json").write_text("words")
    with FolderWriter(
        tmp_path / "out", config={"x": [1]}, companions=[tmp_path / "tokenizer.json"]
    ) as writer:
        writer.copy(like, "a")
    export = open_folder(tmp_path / "out")
    assert export.config == {"x": [1]}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "words"
    with pytest.raises(ValueError, match="needs a folder"):
        FolderWriter(tmp_path / "other")


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file", "broken link"])
def test_output_that_exists(like, tmp_path, kind):
    """Nothing is overwritten, and nothing is touched."""
    out = tmp_path / "out"
    if kind == "broken link":
        out.symlink_to("nowhere")
    elif kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        if kind == "folder":
            (out / "mine").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="exists"), FolderWriter(out, like=like):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def write_and(like, out, action):
    """Write a folder, doing something else before the `with` block ends."""
    with FolderWriter(out, like=like) as writer:
        writer.copy(like, "a")
        action()


def test_output_that_appears_meanwhile(like, tmp_path):
    """A folder that someone else made in the meantime stays theirs, even an empty one."""
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="exists"):
        write_and(like, out, out.mkdir)
    assert not list(out.iterdir())
    assert {file.name for file in tmp_path.iterdir()} == {"like", "out"}


def test_failure_in_the_middle(like, tmp_path):
    """An exception leaves neither the folder nor anything beside it."""
    seen = []

    def fail():
        seen.extend(file.name for file in tmp_path.iterdir())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and(like, tmp_path / "out", fail)
    assert len(seen) == 2
    assert "out" not in seen
    assert [file.name for file in tmp_path.iterdir()] == ["like"]


def test_failure_at_the_end(like, tmp_path, monkeypatch):
    """A disk that fills up while the last files are written leaves nothing either."""

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_and(like, tmp_path / "out", lambda: monkeypatch.setattr(os, "fsync", fail))
    assert [file.name for file in tmp_path.iterdir()] == ["like"]


def test_process_that_is_killed(like, tmp_path):
    """SIGKILL can leave the hidden folder, never the final one, and the next writer clears it away."""
    code = (
        "import os, signal, sys\n"
        "from torpor.checkpoints.folder import FolderWriter, open_folder\n"
        "like = open_folder(sys.argv[1])\n"
        "with FolderWriter(sys.argv[2], like=like) as writer:\n"
        "    writer.copy(like, 'a')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(like.path), str(tmp_path / "out")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.iterdir())) == 2
    assert_same_tensors(like, copy_all(like, tmp_path / "out"))
    assert {file.name for file in tmp_path.iterdir()} == {"like", "out"}


def test_two_writers_of_one_folder(like, tmp_path):
    """A living writer's work is not cleared away; the one that comes second to the name is refused."""
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="exists"):
        write_and(like, out, lambda: copy_all(like, out))
    assert_same_tensors(like, open_folder(out))
    assert {file.name for file in tmp_path.iterdir()} == {"like", "out"}


@pytest.mark.parametrize("max_shard_bytes", [2**30, 20_000])
def test_durable_before_it_has_its_name(nemotron_h, tmp_path, monkeypatch, max_shard_bytes):
    """Every file and the folder are on disk before the rename, the parent after it."""
    source = open_folder(nemotron_h)
    events = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor):
        events.append(Path(f"/proc/self/fd/{descriptor}").resolve())
        real_fsync(descriptor)

    def rename(self, target):
        events.append(("rename", Path(target).name))
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    export = copy_all(source, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    end = events.index(("rename", "out"))
    assert events[end + 1 :] == [tmp_path]
    # Shards, index, configuration, companions, and the folder itself.
    synced = [event for event in events[:end] if isinstance(event, Path)]
    assert len(synced) == len(list(export.path.iterdir())) + 1
    assert len([event for event in synced if event.name.startswith("shard-")]) == len(
        list(export.path.glob("*.safetensors"))
    )
    assert synced[-1].name.endswith(".partial")


def test_source_that_shrinks_while_it_is_copied(like, tmp_path):
    """A caller that catches the error goes on with a sound shard."""
    bigger = open_folder(
        write_folder(tmp_path / "bigger", {"model.safetensors": {"b": ("U8", [64], b"b" * 64)}})
    )
    file = bigger.tensors["b"].file
    file.write_bytes(file.read_bytes()[:-10])
    with FolderWriter(tmp_path / "out", like=like) as writer:
        with pytest.raises(CheckpointError, match="ended 10 bytes before"):
            writer.copy(bigger, "b")
        writer.copy(like, "a")
    assert_same_tensors(like, open_folder(tmp_path / "out"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "U8", (4,), b"aaaa"), "a second time"),
        (("x", "U8", (3,), b"aaaa"), "3 bytes, but 4 were given"),
        (("x", "F4", (3,), b"aa"), "None bytes, but 2"),
        (("x", "Q8", (4,), b"aaaa"), "dtype 'Q8'"),
        (("", "U8", (4,), b"aaaa"), "no name"),
        (("x\n", "U8", (4,), b"aaaa"), "no name"),
    ],
)
def test_tensors_that_cannot_be_written(like, tmp_path, arguments, message):
    """What a reader would refuse is not written in the first place."""
    with FolderWriter(tmp_path / "out", like=like) as writer:
        writer.copy(like, "a")
        with pytest.raises(CheckpointError, match=message):
            writer.add(*arguments)
    assert_same_tensors(like, open_folder(tmp_path / "out"))


def test_nothing_written(like, tmp_path):
    """A folder without tensors is no checkpoint."""
    with (
        pytest.raises(CheckpointError, match="no tensor was written"),
        FolderWriter(tmp_path / "out", like=like),
    ):
        pass
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EXDEV, errno.EINVAL])
def test_where_the_kernel_cannot_copy(like, tmp_path, monkeypatch, error):
    """The bytes go through memory then, and come out the same."""

    def refuse(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assert_same_tensors(like, copy_all(like, tmp_path / "out"))


def test_kernel_that_copies_in_small_pieces(like, tmp_path, monkeypatch):
    """A copy may stop short of what was asked, and is asked again."""
    real = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda source, target, count: real(source, target, 1))
    assert_same_tensors(like, copy_all(like, tmp_path / "out"))


def test_disk_that_fills_up_while_the_kernel_copies(like, tmp_path, monkeypatch):
    """Other errors are errors."""

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", fail)
    with pytest.raises(OSError, match="No space"):
        copy_all(like, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["like"]
