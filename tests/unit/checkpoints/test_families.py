"""Families are told by model_type; their MTP layers are counted in three ways that have to agree."""

import json

import pytest

import tiny
from torpor.checkpoints.families import (
    FAMILIES,
    check_heads,
    count_mtp_layers,
    find_family,
    hybrid_mtp_pattern,
    hybrid_pattern,
)
from torpor.checkpoints.folder import FolderWriter, open_folder
from torpor.errors import CheckpointError, UnsupportedModelError


def rewritten(folder, out, drop=(), rename=None, config=None):
    """A copy of a folder without some tensors, with others renamed, or with other configuration fields."""
    source = open_folder(folder)
    with FolderWriter(out, like=source, config={**source.config, **(config or {})}) as writer:
        for name, entry in source.tensors.items():
            if not name.startswith(tuple(drop)):
                new = (rename or {}).get(name, name)
                writer.add(new, entry.dtype, entry.shape, source.read_bytes(name))
    return open_folder(out)


def test_families_are_found():
    """By model_type and nothing else."""
    assert [find_family({"model_type": family.name}) for family in FAMILIES] == list(FAMILIES)


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": ["mimo"]}, {}])
def test_unknown_family(config):
    """What it is and what is known are in the message."""
    with pytest.raises(UnsupportedModelError, match=r"model_type .*; known are .*nemotron_h, .*mimo"):
        find_family(config)


def test_sound_folders(nemotron_h, mimo):
    """Declared, existing and complete layers agree, for one layer and for two."""
    for path, number in ((nemotron_h, 1), (mimo, 2)):
        folder = open_folder(path)
        check_heads(folder)
        count = count_mtp_layers(folder)
        assert (count.declared, count.physical, count.written, count.missing) == (number, number, number, ())


def test_folder_without_heads(tmp_path):
    """None declared and none there is fine."""
    check_heads(open_folder(tiny.write_mimo(tmp_path / "f", num_mtp=0, tokenizer=False)))


def test_heads_that_are_declared_but_not_there(nemotron_h, tmp_path):
    """The three numbers, the field and the first missing tensor are in the message."""
    folder = rewritten(nemotron_h, tmp_path / "out", drop=["mtp."])
    message = (
        r"declares 1 MTP layers \(num_nextn_predict_layers.*, 0 exist, 0 are complete\n.* first mtp\.layers"
    )
    with pytest.raises(CheckpointError, match=message):
        check_heads(folder)


def test_heads_that_are_there_but_not_declared(nemotron_h, mimo, tmp_path):
    """Also where the field is null or absent."""
    for i, (path, value, number) in enumerate(((nemotron_h, 0, 1), (mimo, None, 2), (mimo, 1, 2))):
        folder = rewritten(path, tmp_path / f"out{i}", config={"num_nextn_predict_layers": value})
        with pytest.raises(CheckpointError, match=rf"declares {value or 0} .* {number} exist"):
            check_heads(folder)


def test_more_declared_than_there(mimo, tmp_path):
    """Two layers exist, three are declared."""
    folder = rewritten(mimo, tmp_path / "out", config={"num_nextn_predict_layers": 3})
    with pytest.raises(CheckpointError, match=r"declares 3 .* 2 exist, 2 are complete"):
        check_heads(folder)


@pytest.mark.parametrize(
    "name",
    ["model.mtp_layers.1.input_proj.weight", "model.mtp_layers.0.self_attn.q_proj.bias"],
)
def test_layer_that_lacks_one_tensor(mimo, tmp_path, name):
    """It exists, but it is not complete."""
    folder = rewritten(mimo, tmp_path / "out", drop=[name])
    with pytest.raises(
        CheckpointError, match=rf"declares 2 .* 2 exist, 1 are complete\n.*1 tensors, first {name}"
    ):
        check_heads(folder)


def test_second_half_of_a_hybrid_layer_is_lost(nemotron_h, tmp_path):
    """A hybrid MTP layer is several numbered layers; all of them count."""
    folder = rewritten(nemotron_h, tmp_path / "out", drop=["mtp.layers.1."])
    with pytest.raises(CheckpointError, match=r"declares 1 .* 1 exist, 0 are complete"):
        check_heads(folder)


def test_layer_under_another_number(mimo, tmp_path):
    """Numbers that leave a gap are no second layer."""
    names = [name for name in open_folder(mimo).tensors if name.startswith("model.mtp_layers.1.")]
    renamed = {name: name.replace("layers.1.", "layers.7.") for name in names}
    folder = rewritten(mimo, tmp_path / "out", rename=renamed)
    count = count_mtp_layers(folder)
    assert (count.declared, count.physical, count.written) == (2, 2, 1)
    with pytest.raises(CheckpointError, match=r"first model\.mtp_layers\.1\."):
        check_heads(folder)


@pytest.mark.parametrize("value", [-1, 1.0, "1", True, 2**40, [1]])
def test_count_that_is_none(value):
    """The field and its value are in the message."""
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers"):
        find_family({"model_type": "mimo"}).declared_mtp_layers(
            {"model_type": "mimo", "num_nextn_predict_layers": value}
        )


@pytest.mark.parametrize(
    "field",
    ["hidden_size", "vocab_size", "mamba_num_heads", "num_attention_heads", "n_routed_experts"],
)
@pytest.mark.parametrize("value", [None, 0, -4, "64", 2**60])
def test_configuration_without_a_size(nemotron_h, field, value):
    """Every size that the map needs is named when it is missing or absurd."""
    config = json.loads((nemotron_h / "config.json").read_text()) | {field: value}
    with pytest.raises(CheckpointError, match=rf"config\.json has {field} "):
        find_family(config).name_map(config)


def test_heads_that_groups_do_not_divide(nemotron_h):
    """Both numbers are in the message."""
    config = json.loads((nemotron_h / "config.json").read_text()) | {"num_key_value_heads": 3}
    with pytest.raises(CheckpointError, match=r"num_attention_heads 4, not a multiple of .* 3"):
        find_family(config).name_map(config)


@pytest.mark.parametrize("field", ["use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"])
def test_biases_that_megatron_lacks(nemotron_h, field):
    """A map that left them out would lose them."""
    config = json.loads((nemotron_h / "config.json").read_text()) | {field: True}
    with pytest.raises(UnsupportedModelError, match=field):
        find_family(config).name_map(config)


def test_convolution_without_bias(nemotron_h):
    """Megatron's has one."""
    config = json.loads((nemotron_h / "config.json").read_text()) | {"use_conv_bias": False}
    with pytest.raises(UnsupportedModelError, match="use_conv_bias False"):
        find_family(config).name_map(config)


def test_both_spellings_of_a_pattern():
    """Letters, and the words of either generation."""
    assert hybrid_pattern({"hybrid_override_pattern": "M*-E"}) == "M*-E"
    assert hybrid_pattern({"layers_block_type": ["mamba", "attention", "mlp", "moe"]}) == "M*-E"
    words = ["linear_attention", "full_attention", "mlp", "moe"]
    assert hybrid_pattern({"layers_block_type": words, "hybrid_override_pattern": "M*-E"}) == "M*-E"
    assert hybrid_mtp_pattern({"mtp_hybrid_override_pattern": "**"}) == "**"
    assert hybrid_mtp_pattern({"mtp_layers_block_type": ["mlp"]}) == "-"
    assert hybrid_mtp_pattern({}) == "*E"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "names no layers"),
        ({"hybrid_override_pattern": ""}, "needs letters"),
        ({"hybrid_override_pattern": "M|M"}, "needs letters"),
        ({"hybrid_override_pattern": ["M"]}, "needs letters"),
        ({"layers_block_type": ["rnn"]}, "'rnn' in layers_block_type"),
        ({"layers_block_type": "mlp"}, "'mlp' in layers_block_type"),
        ({"layers_block_type": [["mlp"]]}, "in layers_block_type"),
        ({"layers_block_type": ["mlp"], "hybrid_override_pattern": "M"}, "contradicts itself"),
    ],
)
def test_patterns_that_are_none(config, message):
    """The field and its value are in the message."""
    with pytest.raises(CheckpointError, match=message):
        hybrid_pattern(config)
