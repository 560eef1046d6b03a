"""Leaving out layers keeps the bytes of everything that stays."""

import pytest

import tiny
from torpor.checkpoints.families import check_heads, find_family
from torpor.checkpoints.folder import open_folder
from torpor.errors import CheckpointError, ConfigError, UnsupportedModelError
from torpor.runs.pruning import drop_layers


@pytest.fixture
def source(tmp_path):
    return open_folder(tiny.write_nemotron_h(tmp_path / "source", pattern="M*-EM*"))


def test_layers_that_stay_are_renumbered_and_keep_their_bytes(source, tmp_path):
    drop_layers(source, [0, 3, 5], tmp_path / "out")
    out = open_folder(tmp_path / "out")
    assert out.config["hybrid_override_pattern"] == "ME*"
    assert out.config["num_hidden_layers"] == 3
    old_number = {0: 0, 1: 3, 2: 5}
    for name in out.tensors:
        old = name
        if name.startswith("backbone.layers."):
            _, _, number, rest = name.split(".", 3)
            old = f"backbone.layers.{old_number[int(number)]}.{rest}"
        assert out.sha256(name) == source.sha256(old)
        assert out.tensors[name].dtype == source.tensors[old].dtype


def test_heads_stay_and_the_folder_is_whole(source, tmp_path):
    drop_layers(source, [2], tmp_path / "out")
    out = open_folder(tmp_path / "out")
    mtp = {name for name in source.tensors if name.startswith("mtp.")}
    assert mtp
    assert mtp == {name for name in out.tensors if name.startswith("mtp.")}
    check_heads(out)
    find_family(out.config).name_map(out.config).check(out.tensors)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source.path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("kept", [[], [1, 0], [0, 0], [0, 6], [-1, 2]])
def test_impossible_choice_is_refused_and_leaves_nothing(source, tmp_path, kept):
    with pytest.raises(ConfigError, match="ascending numbers from 0 to 5"):
        drop_layers(source, kept, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_other_family_is_refused(tmp_path):
    mimo = open_folder(tiny.write_mimo(tmp_path / "mimo"))
    with pytest.raises(UnsupportedModelError, match="'mimo'"):
        drop_layers(mimo, [0], tmp_path / "out")


def test_existing_folder_is_not_overwritten(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError):
        drop_layers(source, [0], tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
