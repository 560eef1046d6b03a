"""Every family's folder, as its manifest in tests/golden spells it out: what is MTP, and what is a copy."""

import json

import pytest

from golden_folders import GOLDEN_NAMES, read_manifest, write_golden
from torpor.checkpoints.families import (
    FAMILIES,
    check_heads,
    count_mtp_layers,
    family_of,
    find_family,
)
from torpor.checkpoints.folder import open_folder
from torpor.errors import CheckpointError, UnsupportedModelError

NUM_LAYERS = {"step3p5": 2, "mimo_v2_flash": 2}
# Their configurations have no field for it.
UNDECLARED = ("qwen3_next", "mimo_v2_flash", "longcat_flash")


@pytest.fixture(params=GOLDEN_NAMES)
def name(request) -> str:
    return request.param


def declared(name: str) -> int | None:
    return None if name in UNDECLARED else NUM_LAYERS.get(name, 1)


def test_every_family_has_a_manifest():
    """No entry of the table goes untested."""
    found = {find_family(read_manifest(name)["config"]).name for name in GOLDEN_NAMES}
    assert found == {family.name for family in FAMILIES}


def test_model_types_are_unambiguous():
    """A model_type names one family."""
    names = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(names) == len(set(names))


def test_what_is_mtp(name, tmp_path):
    """Exactly the manifest's MTP tensors are MTP, and every layer of them is complete."""
    folder, manifest = open_folder(write_golden(tmp_path / "f", name)), read_manifest(name)
    family = family_of(folder)
    mtp, trunk = family.sort(folder.tensors, folder.config)
    assert set(mtp) == manifest["mtp"].keys()
    assert set(trunk) == manifest["trunk"].keys()
    count = count_mtp_layers(folder)
    number = NUM_LAYERS.get(name, 1)
    assert (count.declared, count.physical, count.written, count.missing) == (
        declared(name),
        number,
        number,
        (),
    )
    check_heads(folder)


def test_copies(name, tmp_path):
    """The manifest's copies are among the candidates, and those whose bytes agree are exactly they."""
    folder = open_folder(write_golden(tmp_path / "f", name))
    pairs = family_of(folder).copy_candidates(folder.tensors, folder.config)
    equal = {mtp: trunk for mtp, trunk in pairs if folder.read_bytes(mtp) == folder.read_bytes(trunk)}
    assert equal == read_manifest(name)["copies"]


def test_every_mtp_tensor_is_needed(name, tmp_path):
    """Whichever tensor is lost is reported missing; only a copy that servers do without may go."""
    folder, manifest = open_folder(write_golden(tmp_path / "f", name)), read_manifest(name)
    family = family_of(folder)
    mtp, trunk = family.sort(folder.tensors, folder.config)
    optional = set(manifest["copies"]) if name in ("glm4_moe", "glm4_moe_lite") else set()
    for lost in manifest["mtp"].keys() - optional:
        depth = family.mtp_depth(lost, folder.config)
        left = [tensor for tensor in mtp if tensor != lost]
        assert family.missing_mtp_names(left, trunk, folder.config, depth) == [lost]


def test_lost_heads(name, tmp_path):
    """None there: what is missing is named where the configuration promises it."""
    folder = open_folder(write_golden(tmp_path / "f", name, heads=False))
    count = count_mtp_layers(folder)
    assert (count.physical, count.written) == (0, 0)
    if name in UNDECLARED or name == "minimax_m2":
        assert (count.declared, count.missing) == (None, ())
        return
    assert count.declared == declared(name)
    # Nothing shows any more of which kind the layer's MLP was, but all else is named as it was.
    known = [tensor for tensor in count.missing if ".mlp" not in tensor and "moe" not in tensor]
    assert known
    assert set(known) <= read_manifest(name)["mtp"].keys()
    with pytest.raises(CheckpointError, match="0 exist, 0 are complete"):
        check_heads(folder)


@pytest.mark.parametrize("name", [n for n in GOLDEN_NAMES if n != "qwen3_5_vl"])
@pytest.mark.parametrize("wrapper", ["model.language_model.", "language_model.model.", "language_model."])
def test_wrapped(name, tmp_path, wrapper):
    """Inside another model the same tensors are MTP, and what is missing has that model's prefix."""

    def wrap(tensors):
        return {wrapper + tensor.removeprefix("model."): data for tensor, data in tensors.items()}

    config = read_manifest(name)["config"]
    folder = open_folder(write_golden(tmp_path / "f", name, change=wrap))
    (folder.path / "config.json").write_text(json.dumps({"model_type": "some_vl", "text_config": config}))
    wrapped = open_folder(folder.path)
    family = family_of(wrapped)
    mtp, trunk = family.sort(wrapped.tensors, wrapped.config)
    assert {tensor.removeprefix(wrapper) for tensor in mtp} == {
        tensor.removeprefix("model.") for tensor in read_manifest(name)["mtp"]
    }
    check_heads(wrapped)
    lost = mtp[-1]
    if lost not in dict(family.copy_candidates(wrapped.tensors, wrapped.config)):
        depth = family.mtp_depth(lost, wrapped.config)
        assert family.missing_mtp_names(mtp[:-1], trunk, wrapped.config, depth) == [lost]


def test_training_without_a_map_is_refused(name):
    """Every family can be inspected; those that Megatron's names are known for can be trained."""
    config = read_manifest(name)["config"]
    family = find_family(config)
    if family.megatron:
        family.name_map(config)
        return
    with pytest.raises(UnsupportedModelError, match=f"{family.name} can be inspected.*not trained"):
        family.name_map(config)


def test_two_prefixes(tmp_path):
    """Heads half here and half there are found by no reader."""

    def scatter(tensors):
        tensors["language_model.mtp.fc.weight"] = tensors.pop("mtp.fc.weight")
        return tensors

    folder = open_folder(write_golden(tmp_path / "f", "qwen3_5", change=scatter))
    with pytest.raises(CheckpointError, match="two places"):
        count_mtp_layers(folder)


def test_repeated_layer(tmp_path):
    """A layer that is run three times is there once."""
    config = {"num_nextn_predict_layers": 3, "mtp_share_layers": True}
    folder = open_folder(write_golden(tmp_path / "f", "exaone_moe", **config))
    assert count_mtp_layers(folder).declared == 1
    check_heads(folder)
    folder = open_folder(write_golden(tmp_path / "g", "exaone_moe", **config | {"mtp_share_layers": False}))
    assert count_mtp_layers(folder).declared == 3
    with pytest.raises(CheckpointError, match=r"declares 3 .* 1 exist"):
        check_heads(folder)


def test_more_layers_than_any_model_has(tmp_path):
    """A folder of a larger model under a smaller one's configuration, or one made to take for ever."""
    many = {f"mtp.layers.{i}.x.weight": ("U8", [1], b"x") for i in range(1000)}
    folder = open_folder(write_golden(tmp_path / "f", "qwen3_5", change=lambda t: t | many))
    with pytest.raises(CheckpointError, match="has tensors of 1000 MTP layers"):
        count_mtp_layers(folder)
    with pytest.raises(CheckpointError, match="mtp_num_hidden_layers 1000"):
        count_mtp_layers(open_folder(write_golden(tmp_path / "g", "qwen3_5", mtp_num_hidden_layers=1000)))


def test_both_names_of_the_count(tmp_path):
    """Transformers calls the field otherwise; two that differ are a contradiction."""
    fields = {"num_nextn_predict_layers": None, "num_mtp_layers": 1}
    check_heads(open_folder(write_golden(tmp_path / "a", "deepseek_v3", **fields)))
    folder = open_folder(write_golden(tmp_path / "b", "deepseek_v3", num_mtp_layers=2))
    with pytest.raises(CheckpointError, match="contradicts itself"):
        count_mtp_layers(folder)


def test_unknown_family_with_heads(tmp_path):
    """Reported, with the names that look like it, and never guessed."""
    folder = open_folder(write_golden(tmp_path / "f", "qwen3_5", model_type="qwen9"))
    with pytest.raises(
        UnsupportedModelError, match=r"'qwen9'.*\n  15 of its tensors look like MTP, first mtp\."
    ):
        family_of(folder)


def test_unknown_family_without_heads(tmp_path):
    """Nothing is said about MTP where nothing looks like it."""
    folder = open_folder(write_golden(tmp_path / "f", "qwen3_5", heads=False, model_type="qwen9"))
    with pytest.raises(UnsupportedModelError) as error:
        family_of(folder)
    assert "look like" not in str(error.value)


def test_quantised_trunk_and_plain_heads(tmp_path):
    """A decoder layer is compared with the trunk's, whatever its weights are packed as."""

    def pack(tensors):
        packed = {}
        for tensor, (dtype, shape, data) in tensors.items():
            if ".layers." in tensor and not tensor.startswith("mtp.") and tensor.endswith("_proj.weight"):
                packed[tensor + "_packed"] = ("U8", [*shape, 1], data[: len(data) // 2])
                packed[tensor + "_scale"] = ("F32", [1], bytes(4))
            else:
                packed[tensor] = (dtype, shape, data)
        return packed

    folder = open_folder(write_golden(tmp_path / "f", "qwen3_5", change=pack))
    assert "model.layers.1.self_attn.q_proj.weight_packed" in folder.tensors
    check_heads(folder)
    folder = open_folder(
        write_golden(
            tmp_path / "g",
            "qwen3_5",
            change=lambda t: {
                n: v for n, v in pack(t).items() if n != "mtp.layers.0.self_attn.q_proj.weight"
            },
        )
    )
    assert count_mtp_layers(folder).missing == ("mtp.layers.0.self_attn.q_proj.weight",)


def test_experts_of_two_styles(tmp_path):
    """Heads with one tensor for each expert beside a trunk with one for all, as trainers write it."""

    def stack(tensors):
        stacked = {n: v for n, v in tensors.items() if ".experts." not in n or n.startswith("mtp.")}
        for i in range(4):
            stacked[f"model.layers.{i}.mlp.experts.gate_up_proj"] = ("U8", [1], b"x")
            stacked[f"model.layers.{i}.mlp.experts.down_proj"] = ("U8", [1], b"x")
        return stacked

    check_heads(open_folder(write_golden(tmp_path / "f", "qwen3_5_moe", change=stack)))
    lost = "mtp.layers.0.mlp.experts.3.up_proj.weight"
    folder = open_folder(
        write_golden(
            tmp_path / "g", "qwen3_5_moe", change=lambda t: {n: v for n, v in stack(t).items() if n != lost}
        )
    )
    assert count_mtp_layers(folder).missing == (lost,)
