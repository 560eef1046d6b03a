"""Damaged and hostile folders: each ends in one clear error, with nothing touched and nothing left behind.

Every attack is made from a sound folder and tried in every place where a folder can stand.
"""

import contextlib
import hashlib
import json
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from golden_folders import golden_tensors, write_golden, write_tensors
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.graft import graft_folder
from torpor.checkpoints.inspect import inspect_folder
from torpor.checkpoints.verify import verify_folders
from torpor.errors import CheckpointError, TorporError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NAME = "qwen3_5"


def read_header(folder):
    data = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(folder, header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def edit(change):
    """An attack that changes the header of the weights."""

    def attack(folder):
        header, data = read_header(folder)
        change(header)
        write_header(folder, header, data)

    return attack


def truncate(folder):
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-7])


def overlap(header):
    a, b = list(header.values())[1:3]
    a["data_offsets"] = b["data_offsets"]
    a["shape"], a["dtype"] = b["shape"], b["dtype"]


def wrong_size(header):
    next(iter(list(header.values())[1:]))["shape"].append(2)


def length_bomb(folder):
    header, data = read_header(folder)
    write_header(folder, header, data, length=2**62)


def long_header(folder):
    header, data = read_header(folder)
    write_header(folder, header, data, length=99_999_999)


def deep_header(folder):
    _, data = read_header(folder)
    write_header(folder, b'{"a":' + b"[" * 200_000 + b"}", data)


def duplicate_key(folder):
    header, data = read_header(folder)
    text = json.dumps(header)
    name = list(header)[-1]
    write_header(folder, (text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}").encode(), data)


def split(folder, other="model-2.safetensors"):
    """Make two shards and an index out of the one file."""
    tensors = golden_tensors(NAME)
    names = sorted(tensors)
    (folder / WEIGHTS).unlink()
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        write_tensors(folder / file, {name: tensors[name] for name in part})
    weight_map = {
        name: (file if file.endswith("1.safetensors") else other) for file in parts for name in parts[file]
    }
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def duplicate_across_shards(folder):
    tensors = split(folder)
    names = sorted(tensors)
    write_tensors(folder / "model-2.safetensors", {name: tensors[name] for name in [*names[1::2], names[0]]})


def index_outside(target):
    def attack(folder):
        outside = folder.parent / "outside.safetensors"
        outside.write_bytes((folder / WEIGHTS).read_bytes())
        split(folder, other=target.format(outside=outside))

    return attack


def link_outside(folder):
    outside = folder.parent / "outside.safetensors"
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)


def missing_shard(folder):
    split(folder)
    (folder / "model-2.safetensors").unlink()


def pickle_instead(folder):
    (folder / WEIGHTS).unlink()
    # Whoever unpickles this removes the folder's configuration.
    (folder / "pytorch_model.bin").write_bytes(
        b"cos\nunlink\n(V" + str(folder / "config.json").encode() + b"\ntR."
    )


def bad_config(text):
    return lambda folder: (folder / "config.json").write_text(text)


def config(**fields):
    def attack(folder):
        whole = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(whole | fields))

    return attack


ATTACKS = {
    "truncated tensors": truncate,
    "overlapping tensors": edit(overlap),
    "wrong size": edit(wrong_size),
    "unknown dtype": edit(lambda h: list(h.values())[1].update(dtype="Q4")),
    "negative shape": edit(lambda h: list(h.values())[1].update(shape=[-1, -64])),
    "huge shape": edit(lambda h: list(h.values())[1].update(shape=[2**63, 2**63])),
    "negative offsets": edit(lambda h: list(h.values())[1].update(data_offsets=[-8, 0])),
    "control characters": edit(lambda h: h.update({"mtp.\x1b[2J": h.pop("mtp.fc.weight")})),
    "header length bomb": length_bomb,
    "header longer than the file": long_header,
    "deeply nested header": deep_header,
    "header that is no JSON": lambda folder: write_header(folder, b"{", b""),
    "key twice in one header": duplicate_key,
    "key in two shards": duplicate_across_shards,
    "index to an absolute path": index_outside("{outside}"),
    "index to the parent": index_outside("../outside.safetensors"),
    "index to a folder": index_outside("."),
    "link outside": link_outside,
    "missing shard": missing_shard,
    "pickle": pickle_instead,
    "no configuration": lambda folder: (folder / "config.json").unlink(),
    "empty configuration": bad_config(""),
    "configuration of another kind": bad_config("[]"),
    "deeply nested configuration": bad_config('{"text_config":' * 100_000),
    "absurd count": config(mtp_num_hidden_layers=2**40),
    "count of another kind": config(mtp_num_hidden_layers="1"),
    "empty file": lambda folder: (folder / WEIGHTS).write_bytes(b""),
}


def fingerprint(path):
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_attack(tmp_path, attack):
    """As the folder to inspect, as source, as export, as the heads and as the trunk."""
    sound = write_golden(tmp_path / "sound", NAME)
    tuned = write_golden(tmp_path / "tuned", NAME, seed=1, heads=False)
    bad = write_golden(tmp_path / "bad" / "folder", NAME)
    attack(bad)
    before = fingerprint(tmp_path)
    out = tmp_path / "out"
    for use in (
        lambda: inspect_folder(bad),
        lambda: verify_folders(bad, sound),
        lambda: verify_folders(sound, bad),
        lambda: graft_folder(bad, tuned, out),
        lambda: graft_folder(sound, bad, out),
    ):
        with pytest.raises(CheckpointError) as error:
            use()
        assert "\x1b" not in str(error.value)
    assert fingerprint(tmp_path) == before


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_damage(tmp_path_factory, data):
    """Whatever bytes of header, index or configuration are changed, nothing but our own errors come out."""
    path = write_golden(tmp_path_factory.mktemp("fuzz") / "f", NAME)
    file = path / data.draw(st.sampled_from([WEIGHTS, "config.json"]))
    whole = bytearray(file.read_bytes())
    limit = min(len(whole), 9000)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, limit - 1))
        whole[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    file.write_bytes(bytes(whole))
    sound = write_golden(path.parent / "sound", NAME)
    for use in (lambda: inspect_folder(path).to_json(), lambda: verify_folders(sound, path).to_json()):
        with contextlib.suppress(TorporError):
            json.dumps(use())


@settings(deadline=None, max_examples=80)
@given(
    fields=st.dictionaries(
        st.sampled_from(
            [
                "num_hidden_layers",
                "mtp_num_hidden_layers",
                "num_nextn_predict_layers",
                "num_experts",
                "text_config",
                "quantization_config",
                "model_type",
                "mtp_hybrid_override_pattern",
                "mtp_layers_block_type",
            ]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["model_type", "quant_method", "ignore", "text_config", "num_hidden_layers"]
                    ),
                    inner,
                )
            ),
            max_leaves=6,
        ),
    ),
    name=st.sampled_from(["qwen3_5", "nemotron_h", "deepseek_v3", "exaone_moe"]),
)
def test_any_configuration(tmp_path_factory, fields, name):
    """A configuration that says anything at all is believed or refused, and never crashes."""
    path = write_golden(tmp_path_factory.mktemp("fuzz") / "f", name)
    whole = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(whole))
    with contextlib.suppress(TorporError):
        json.dumps(inspect_folder(path).to_json())


def test_payloads_are_left_alone(tmp_path):
    """NaNs with payloads, negative zeros and tensors of no elements come through bit by bit."""
    odd = {
        "mtp.fc.weight": bytes([0xA5, 0xFF, 0x01, 0x7F, 0x00, 0x80, 0xC1, 0xFF]) * (64 * 128 * 2 // 8),
        "model.norm.weight": bytes([0xDE, 0x7F]) * 64,
    }

    def change(tensors):
        for name, data in odd.items():
            if name in tensors:
                tensors[name] = (*tensors[name][:2], data)
        empty = {"model.empty": ("BF16", [0, 4], b"")}
        if "mtp.fc.weight" in tensors:
            empty["mtp.empty"] = ("F32", [4, 0], b"")
        return tensors | empty

    source = write_golden(tmp_path / "source", NAME, change=change)
    tuned = write_golden(tmp_path / "tuned", NAME, heads=False, change=change)
    graft_folder(source, tuned, tmp_path / "out")
    out = open_folder(tmp_path / "out")
    for name, data in odd.items():
        assert out.read_bytes(name) == data
    assert out.tensors["mtp.empty"].shape == (4, 0)
    assert verify_folders(source, tmp_path / "out").ok
