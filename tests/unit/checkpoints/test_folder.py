"""Folders are opened whole or refused with one clear message."""

import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from raw_folders import write_folder, write_sound_file
from torpor.checkpoints import folder as folder_module
from torpor.checkpoints.folder import INDEX_NAME, open_folder
from torpor.errors import CheckpointError

A = {"a": ("U8", [4], b"aaaa")}
B = {"b": ("U8", [4], b"bbbb")}
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
MAP = {"a": ONE, "b": TWO}


def sharded(tmp_path, **changes):
    return write_folder(tmp_path / "model", {ONE: A, TWO: B}, MAP | changes)


def test_every_tensor_is_what_safetensors_reads(nemotron_h):
    """Bytes, values and hashes agree with the reference reader, over all shards."""
    folder = open_folder(nemotron_h)
    seen = 0
    for file in nemotron_h.glob("*.safetensors"):
        for name, expected in load_file(file).items():
            tensor = folder.read_tensor(name)
            assert tensor.dtype == expected.dtype
            assert tensor.shape == expected.shape
            raw = expected.contiguous().view(torch.uint8).numpy().tobytes()
            assert folder.read_bytes(name) == raw
            assert folder.sha256(name) == hashlib.sha256(raw).hexdigest()
            seen += 1
    assert seen == len(folder.tensors) > 50


def test_config_and_companions(nemotron_h):
    """The configuration is kept verbatim; the tokenizer's files are companions, weights are not."""
    folder = open_folder(str(nemotron_h))
    assert folder.config["model_type"] == "nemotron_h"
    assert folder.config_bytes == (nemotron_h / "config.json").read_bytes()
    assert [file.name for file in folder.companions] == [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_tensor_has_memory_of_its_own(copied, mimo):
    """A tensor may be written to without the file noticing."""
    folder = open_folder(copied(mimo))
    before = folder.sha256("lm_head.weight")
    folder.read_tensor("lm_head.weight").zero_()
    assert folder.sha256("lm_head.weight") == before


@pytest.mark.parametrize("chunk", [1, 3, 4, 5])
def test_reading_in_pieces(tmp_path, monkeypatch, chunk):
    """The pieces of a tensor are its bytes, however they fall."""
    monkeypatch.setattr(folder_module, "CHUNK_BYTES", chunk)
    folder = open_folder(sharded(tmp_path))
    pieces = [bytes(piece) for piece in folder.iter_bytes("b")]
    assert b"".join(pieces) == folder.read_bytes("b") == b"bbbb"
    assert all(len(piece) <= chunk for piece in pieces)
    assert folder.sha256("b") == hashlib.sha256(b"bbbb").hexdigest()


def test_a_sample_is_of_the_whole_tensor(tmp_path):
    """It begins and ends with the tensor, has as many bytes as are asked for, and all of a small one."""
    data = bytes(range(200))
    folder = open_folder(write_folder(tmp_path / "model", {"model.safetensors": {"a": ("U8", [200], data)}}))
    sample = folder.read_sample("a", 32)
    assert (len(sample), sample[:2], sample[-2:]) == (32, data[:2], data[-2:])
    assert len(set(sample)) == 32
    assert folder.read_sample("a", 199)[-13:] == data[-13:]
    assert folder.read_sample("a", 200) == folder.read_sample("a", 1000) == data
    with folder.entry("a").file.open("r+b") as file:
        file.truncate(folder.entry("a").offset + 100)
    with pytest.raises(CheckpointError):
        folder.read_sample("a", 32)


def test_empty_and_scalar_tensors(tmp_path):
    """Shapes without elements or without dimensions are kept."""
    tensors = {"e": ("F32", [0, 3], b""), "s": ("F32", [], b"\0\0\x80\x3f")}
    folder = open_folder(write_folder(tmp_path / "model", {"model.safetensors": tensors}))
    assert folder.read_tensor("e").shape == (0, 3)
    assert folder.read_tensor("s") == torch.tensor(1.0)
    assert folder.sha256("e") == hashlib.sha256(b"").hexdigest()


def test_dtype_that_torch_lacks(tmp_path):
    """It can be hashed and copied, but not made a tensor, and the message says why."""
    folder = open_folder(
        write_folder(tmp_path / "model", {"model.safetensors": {"x": ("F6_E2M3", [4], b"abc")}})
    )
    assert folder.read_bytes("x") == b"abc"
    with pytest.raises(CheckpointError, match="F6_E2M3"):
        folder.read_tensor("x")


def test_absent_tensor(tmp_path):
    """The name and the folder are in the message."""
    with pytest.raises(CheckpointError, match=r"model has no tensor nope"):
        open_folder(sharded(tmp_path)).read_bytes("nope")


def test_file_that_shrinks_while_in_use(tmp_path):
    """Short reads are never taken for data."""
    folder = open_folder(sharded(tmp_path))
    file = folder.tensors["b"].file
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match=r"ended 2 bytes before the end of b"):
        folder.read_bytes("b")


def test_missing_folder(tmp_path):
    """A path that does not exist is refused, and so is one that is a file."""
    with pytest.raises(CheckpointError, match="does not exist"):
        open_folder(tmp_path / "nope")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_folder(tmp_path / "file")


def test_folder_without_config(tmp_path):
    """Weights alone are no model."""
    (sharded(tmp_path) / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_folder(tmp_path / "model")


@pytest.mark.parametrize("config", ["[]", "{", "", '{"a": 1, "a": 2}', "null"])
def test_config_that_is_no_object(tmp_path, config):
    """The file is named, whatever is wrong with it."""
    write_folder(tmp_path / "model", {"model.safetensors": A}, config=config)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_folder(tmp_path / "model")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.gguf"])
def test_other_formats_are_refused_and_never_opened(tmp_path, name):
    """A pickle is not even looked into: the file here cannot be read without blocking for ever."""
    path = write_folder(tmp_path / "model", {})
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match=rf"{name}, needs safetensors"):
        open_folder(path)


def test_folder_without_weights(tmp_path):
    """A configuration alone is no checkpoint."""
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_folder(write_folder(tmp_path / "model", {}))


def test_shards_without_an_index(tmp_path):
    """Without an index nobody can tell whether a shard is missing."""
    with pytest.raises(CheckpointError, match=r"2 safetensors files.* no model\.safetensors\.index"):
        open_folder(write_folder(tmp_path / "model", {ONE: A, TWO: B}))


def test_single_file_that_the_index_does_not_know(tmp_path):
    """Readers disagree about which to take, so neither is taken."""
    write_sound_file(sharded(tmp_path) / "model.safetensors", A)
    with pytest.raises(CheckpointError, match="does not mention it"):
        open_folder(tmp_path / "model")


def test_tensor_in_two_shards(tmp_path):
    """The index could decide, but one of the two would be lost silently."""
    write_folder(tmp_path / "model", {ONE: A, TWO: A | B}, MAP)
    with pytest.raises(CheckpointError, match=rf"a is in two files, {ONE} and {TWO}"):
        open_folder(tmp_path / "model")


def test_tensor_that_the_index_does_not_list(tmp_path):
    """A tensor beside the index would be loaded by some readers and not by others."""
    write_folder(tmp_path / "model", {ONE: A, TWO: B | {"c": ("U8", [1], b"c")}}, MAP)
    with pytest.raises(CheckpointError, match="the index says no file"):
        open_folder(tmp_path / "model")


def test_tensor_that_only_the_index_lists(tmp_path):
    """What is promised has to be there."""
    with pytest.raises(CheckpointError, match=r"lists 1 tensors that no file holds, first c"):
        open_folder(sharded(tmp_path, c=TWO))


def test_shard_that_is_missing(tmp_path):
    """The file is named."""
    (sharded(tmp_path) / TWO).unlink()
    with pytest.raises(CheckpointError, match=rf"{TWO} is missing"):
        open_folder(tmp_path / "model")


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/etc/outside.safetensors",
        "sub/x.safetensors",
        "..",
        "",
        "config.json",
        7,
        None,
        ["x"],
    ],
)
def test_index_that_points_elsewhere(tmp_path, shard):
    """Only plain names of safetensors files are followed."""
    write_sound_file(tmp_path / "outside.safetensors", B)
    with pytest.raises(CheckpointError, match=r"puts b into .* needs the plain name"):
        open_folder(sharded(tmp_path, b=shard))


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_that_is_no_index(tmp_path, text):
    """The index is named, whatever is wrong with it."""
    (sharded(tmp_path) / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        open_folder(tmp_path / "model")


@pytest.mark.parametrize("name", [TWO, "config.json", INDEX_NAME, "tokenizer.json"])
def test_link_that_leads_out_of_the_folder(tmp_path, name):
    """Neither weights nor companions are taken from elsewhere."""
    path = sharded(tmp_path)
    (path / "tokenizer.json").write_text("{}")
    (path / name).rename(tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=r"is a link to .*outside, outside its folder"):
        open_folder(path)


def test_broken_link(tmp_path):
    """A download that was not finished is named as such."""
    (sharded(tmp_path) / TWO).unlink()
    (tmp_path / "model" / TWO).symlink_to("gone.safetensors")
    with pytest.raises(CheckpointError, match=rf"{TWO} is a broken link"):
        open_folder(tmp_path / "model")


def test_download_cache(tmp_path):
    """A cache's snapshots consist of links into its blobs; those are followed, and keep their names."""
    snapshots, blobs = tmp_path / "snapshots", tmp_path / "blobs"
    snapshots.mkdir()
    blobs.mkdir()
    path = write_folder(snapshots / "abc", {ONE: A, TWO: B}, MAP)
    for file in list(path.iterdir()):
        file.rename(blobs / f"hash-of-{file.name}")
        file.symlink_to(f"../../blobs/hash-of-{file.name}")
    folder = open_folder(path)
    assert folder.read_bytes("b") == b"bbbb"
    assert folder.tensors["b"].file.name == TWO


def test_folder_reached_through_a_link(tmp_path):
    """The user's own link to a folder is theirs to use."""
    sharded(tmp_path)
    (tmp_path / "link").symlink_to("model")
    assert open_folder(tmp_path / "link").read_bytes("a") == b"aaaa"


def test_weights_that_are_no_regular_file(tmp_path):
    """A pipe would block for ever."""
    path = sharded(tmp_path)
    (path / TWO).unlink()
    os.mkfifo(path / TWO)
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_folder(path)


def test_no_error_of_the_system_gets_through(tmp_path, monkeypatch):
    """A folder without permission is refused like any other."""

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(folder_module, "read_header", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read.*Permission denied"):
        open_folder(sharded(tmp_path))


def test_oversized_json(tmp_path, monkeypatch):
    """An index that would fill the memory is refused by its size."""
    monkeypatch.setattr(folder_module, "MAX_JSON_BYTES", 20)
    with pytest.raises(CheckpointError, match="at most 20 are read"):
        open_folder(sharded(tmp_path))


def test_index_metadata_is_left_alone(tmp_path):
    """Totals in an index are often wrong and mean nothing to us."""
    file = sharded(tmp_path) / INDEX_NAME
    file.write_text(json.dumps({"metadata": {"total_size": -1}, "weight_map": MAP}))
    assert len(open_folder(tmp_path / "model").tensors) == 2
