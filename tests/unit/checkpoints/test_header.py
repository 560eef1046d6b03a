"""Headers are believed only after every claim in them has been checked."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from raw_folders import header_of, write_file, write_sound_file
from torpor.checkpoints.header import DTYPE_BITS, num_bytes, read_header
from torpor.errors import CheckpointError

TWO = {"a": ("F32", [2], b"\1" * 8), "b": ("BF16", [3, 1], b"\2" * 6)}
DATA = b"\1" * 8 + b"\2" * 6


def test_sound_file_is_read(tmp_path):
    """Names, dtypes, shapes and absolute positions are those in the file."""
    file = write_sound_file(tmp_path / "f.safetensors", TWO)
    entries = read_header(file)
    assert list(entries) == ["a", "b"]
    b = entries["b"]
    assert (b.dtype, b.shape, b.nbytes, b.file) == ("BF16", (3, 1), 6, file)
    assert file.read_bytes()[b.offset : b.offset + b.nbytes] == b"\2" * 6


def test_what_safetensors_itself_writes_is_read(tmp_path):
    """Metadata, padding, empty and scalar tensors are fine."""
    tensors = {"s": torch.tensor(1.5), "e": torch.empty(0, 4), "t": torch.arange(3, dtype=torch.int64)}
    file = tmp_path / "f.safetensors"
    file.write_bytes(save(tensors, metadata={"format": "pt"}))
    shapes = {name: entry.shape for name, entry in read_header(file).items()}
    assert shapes == {"s": (), "e": (0, 4), "t": (3,)}


@pytest.mark.parametrize("size", [0, 7])
def test_file_shorter_than_its_length_field(tmp_path, size):
    """A file without a header is named as truncated or foreign."""
    file = tmp_path / "f.safetensors"
    file.write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match=f"has {size} bytes"):
        read_header(file)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001])
def test_header_length_bomb(tmp_path, length):
    """A length beyond the format's limit is refused before anything is allocated."""
    file = write_file(tmp_path / "f.safetensors", header_of(TWO), DATA, length=length)
    with pytest.raises(CheckpointError, match="the format allows"):
        read_header(file)


def test_header_longer_than_the_file(tmp_path):
    """A header that would end behind the file means truncation."""
    file = write_file(tmp_path / "f.safetensors", header_of(TWO), DATA, length=10_000)
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(file)


@pytest.mark.parametrize("cut", [1, 6, 13])
def test_truncated_data(tmp_path, cut):
    """Bytes missing at the end are found from the header alone."""
    file = write_sound_file(tmp_path / "f.safetensors", TWO)
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"(?s)b ends at byte .* truncated"):
        read_header(file)


def changed(name, **fields):
    header = header_of(TWO)
    header[name].update(fields)
    return header


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (changed("b", data_offsets=[4, 10]), "overlap"),
        (changed("b", data_offsets=[9, 15]), "belong to no tensor"),
        (changed("b", data_offsets=[14, 8]), r"needs \[start, end\]"),
        (changed("b", data_offsets=[8]), r"needs \[start, end\]"),
        (changed("b", data_offsets=[-6, 0]), r"needs \[start, end\]"),
        (changed("b", data_offsets=[8, 2**70]), r"needs \[start, end\]"),
        (changed("b", data_offsets="8"), r"needs \[start, end\]"),
        (changed("b", dtype="F32"), "12 bytes, but data_offsets span 6"),
        (changed("b", dtype="BF17"), "dtype 'BF17'"),
        (changed("b", dtype=["BF16"]), "dtype"),
        (changed("b", dtype="F4", shape=[3]), "whole bytes"),
        (changed("b", shape=[4]), "8 bytes, but data_offsets span 6"),
        (changed("b", shape=[2**62, 2**62]), "data_offsets span"),
        (changed("b", shape=[-3, -1]), "needs a list of counts"),
        (changed("b", shape=[3.0]), "needs a list of counts"),
        (changed("b", shape=[True, 3]), "needs a list of counts"),
        (changed("b", shape=3), "needs a list of counts"),
        (changed("b", more=1), "needs exactly"),
        ({"b": 1}, "needs exactly"),
        ({"b": {"dtype": "F32"}}, "needs exactly"),
        (changed("b") | {"": header_of(TWO)["b"]}, "no name"),
        (changed("b") | {"c\x1b[2J": header_of(TWO)["b"]}, "no name"),
        (b"", "brace"),
        (b"[1, 2]", "brace"),
        (b"{" * 10, "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b'{"a":' + b"1" * 5_000 + b"}", "not valid JSON"),
        (b'{"\xff": 1}', "not valid JSON"),
        (b'{"a": {"dtype": "U8", "shape": [14], "data_offsets": [0, 14], "shape": [14]}}', "twice"),
        (b'{"a": 1, "a": 2}', "the key 'a' is there twice"),
    ],
)
def test_hostile_headers(tmp_path, header, message):
    """Whatever a header claims wrongly is named, and never ends in another exception."""
    file = write_file(tmp_path / "f.safetensors", header, DATA)
    with pytest.raises(CheckpointError, match=message):
        read_header(file)


def test_bytes_behind_the_last_tensor(tmp_path):
    """Nothing may hide behind the tensors."""
    file = write_file(tmp_path / "f.safetensors", header_of(TWO), DATA + b"more")
    with pytest.raises(CheckpointError, match="last 4 bytes"):
        read_header(file)


@pytest.fixture(scope="module")
def spoilt_file(tmp_path_factory):
    return tmp_path_factory.mktemp("spoilt") / "f.safetensors"


@settings(deadline=None)
@given(st.data())
def test_any_damage_is_refused_or_harmless(spoilt_file, data):
    """Bytes changed anywhere before the tensors never raise anything but CheckpointError."""
    sound = bytearray(write_sound_file(spoilt_file, TWO).read_bytes())
    end = len(sound) - len(DATA)
    for _ in range(data.draw(st.integers(1, 4))):
        sound[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    spoilt_file.write_bytes(sound[: data.draw(st.integers(0, len(sound)))])
    try:
        entries = read_header(spoilt_file)
    except CheckpointError:
        return
    assert sum(entry.nbytes for entry in entries.values()) <= spoilt_file.stat().st_size


def test_every_dtype_of_safetensors_has_its_size():
    """The sizes are PyTorch's own."""
    from safetensors.torch import _TYPES

    for word, dtype in _TYPES.items():
        assert num_bytes(word, [3]) == 3 * dtype.itemsize, word
    assert DTYPE_BITS["F4"] == 4
    assert num_bytes("F6_E2M3", [4]) == 3


def test_length_is_little_endian(tmp_path):
    """Golden bytes: the file that the format's description gives."""
    file = tmp_path / "f.safetensors"
    header = b'{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    file.write_bytes(bytes([len(header), 0, 0, 0, 0, 0, 0, 0]) + header + b"ab")
    assert read_header(file)["x"].offset == 8 + len(header)
    assert struct.pack("<Q", len(header)) == file.read_bytes()[:8]
