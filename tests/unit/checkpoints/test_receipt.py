"""A receipt says what a verified folder held, and finds out if it no longer does."""

import json

import pytest

from golden_folders import write_golden
from sabotage import drop, flip_bit, reshape, retype, set_config, write_changed
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.receipt import check_receipt, write_receipt
from torpor.checkpoints.verify import verify_folders
from torpor.errors import CheckpointError

TRUNK, HEAD = "model.layers.0.self_attn.o_proj.weight", "model.layers.3.eh_proj.weight"


@pytest.fixture
def export(tmp_path):
    """A verified folder, its source gone, and the receipt beside it."""
    source = write_golden(tmp_path / "source", "deepseek_v3")
    out = write_changed(source, tmp_path / "export", flip_bit(TRUNK))
    write_receipt(verify_folders(source, out, hash_all=True), tmp_path / "receipt.json")
    for file in source.iterdir():
        file.unlink()
    return out


def test_what_it_says(export, tmp_path):
    """Every tensor with its hash and its part, what was compared, and which versions did it."""
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    folder = open_folder(export)
    assert {name: said["sha256"] for name, said in receipt["tensors"].items()} == {
        name: folder.sha256(name) for name in folder.tensors
    }
    parts = [said["part"] for said in receipt["tensors"].values()]
    assert (parts.count("mtp"), parts.count("copy"), parts.count("trunk")) == (30, 2, 67)
    assert receipt["compared"]["trunk"]["changed"] == 1
    assert {"python", "torpor", "safetensors"} <= receipt["versions"].keys()
    assert receipt["family"] == "deepseek_v3"


def test_unchanged(export, tmp_path):
    """The same folder, without its source."""
    result = check_receipt(tmp_path / "receipt.json", export)
    assert result.ok
    assert result.to_json() == {
        "ok": True,
        "receipt": str(tmp_path / "receipt.json"),
        "family": "deepseek_v3",
        "tensors": 99,
        "differing": [],
        "missing": [],
        "unexpected": [],
        "config_changed": False,
    }


@pytest.mark.parametrize("name", [TRUNK, HEAD, "model.layers.3.embed_tokens.weight"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        (flip_bit, "differing"),
        (lambda name: retype(name, "F16"), "differing"),
        (lambda name: reshape(name, -1), "differing"),
        (drop, "missing"),
    ],
)
def test_changed(export, tmp_path, name, change, field):
    """A bit, a dtype, a shape, a whole tensor, in any part."""
    if change(name).__qualname__.startswith("reshape"):
        size = open_folder(export).tensors[name].nbytes // 2
        spoil = reshape(name, size)
    else:
        spoil = change(name)
    result = check_receipt(tmp_path / "receipt.json", write_changed(export, tmp_path / "changed", spoil))
    assert not result.ok
    assert result.to_json()[field] == [name]


def test_added_tensor_and_changed_configuration(export, tmp_path):
    """What the receipt does not list was not there."""
    changed = write_changed(export, tmp_path / "changed", add=(("x", "U8", (1,), b"x"),))
    assert check_receipt(tmp_path / "receipt.json", changed).unexpected == ("x",)
    set_config(export, rope_theta=1)
    result = check_receipt(tmp_path / "receipt.json", export)
    assert (result.ok, result.is_config_changed) == (False, True)


def test_failed_verification_gets_none(tmp_path):
    """There is nothing to write down."""
    source = write_golden(tmp_path / "source", "deepseek_v3")
    out = write_changed(source, tmp_path / "export", flip_bit(HEAD))
    result = verify_folders(source, out, hash_all=True)
    with pytest.raises(CheckpointError, match="its verification failed"):
        write_receipt(result, tmp_path / "receipt.json")
    assert not (tmp_path / "receipt.json").exists()


def test_existing_file(export, tmp_path):
    """Nothing is overwritten, and nothing is left beside it."""
    source = write_golden(tmp_path / "again", "deepseek_v3")
    before = (tmp_path / "receipt.json").read_bytes()
    with pytest.raises(CheckpointError, match="exists"):
        write_receipt(verify_folders(source, source, hash_all=True), tmp_path / "receipt.json")
    assert (tmp_path / "receipt.json").read_bytes() == before
    assert not list(tmp_path.glob(".receipt*"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: r | {"format": 2}, "format 2, needs 1"),
        (lambda r: r | {"tensors": []}, "no valid tensors"),
        (lambda r: r | {"tensors": {}}, "no valid tensors"),
        (lambda r: r | {"tensors": {"a": {"dtype": "U8"}}}, "no valid tensors"),
        (lambda r: r | {"export": {}}, "no valid export"),
        (lambda r: [], "needs an object"),
    ],
)
def test_damaged_receipt(export, tmp_path, spoil, message):
    """Refused, whatever is wrong with it."""
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(spoil(json.loads(file.read_text()))))
    with pytest.raises(CheckpointError, match=message):
        check_receipt(file, export)


def test_missing_receipt(export, tmp_path):
    """Refused by name."""
    with pytest.raises(CheckpointError, match=r"nope\.json cannot be read"):
        check_receipt(tmp_path / "nope.json", export)
