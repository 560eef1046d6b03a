"""A verification passes for a sound export, and fails for every way in which one can be wrong."""

import hashlib
import json
import subprocess
import sys
import tracemalloc

import pytest

import tiny
from golden_folders import GOLDEN_NAMES, golden_tensors, read_manifest, write_golden
from raw_folders import write_folder
from sabotage import drop, flip_bit, rename, reshape, retype, write_changed
from torpor.checkpoints import folder as folder_module
from torpor.checkpoints.families import family_of
from torpor.checkpoints.family import Family
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.verify import compare_folders, verify_folders
from torpor.errors import CheckpointError, UnsupportedModelError

MTP = "mtp.layers.0.mixer.q_proj.weight"
TRUNK = "backbone.layers.1.mixer.q_proj.weight"
BIAS = "mtp.layers.1.mixer.gate.e_score_correction_bias"


@pytest.fixture
def verify(nemotron_h, tmp_path):
    """A function that verifies a changed copy of the hybrid folder and returns the JSON."""

    def run(*args, **options):
        export = write_changed(nemotron_h, tmp_path / "export", *args, **options)
        result = verify_folders(nemotron_h, export)
        report = result.to_json()
        assert report["ok"] == result.ok
        return report

    return run


def test_sound_export(verify, nemotron_h):
    """Everything identical, nothing changed, and the hashes are those of the bytes."""
    report = verify()
    folder = open_folder(nemotron_h)
    names = [name for name in folder.tensors if name.startswith("mtp.")]
    hashes = report["mtp"].pop("sha256")
    assert report == {
        "ok": True,
        "family": "nemotron_h",
        "mtp": {"tensors": 22, "identical": 22, "differing": [], "missing": [], "unexpected": []},
        "copies": {"tensors": 0, "stale": []},
        "trunk": {"tensors": 33, "changed": 0, "missing": [], "unexpected": [], "mismatched": []},
        "quantization": {"problems": []},
        "config": {"declared": 1, "physical": 1, "written": 1},
        "config_changed": [],
        "source_config": {"declared": 1, "physical": 1, "written": 1},
    }
    assert hashes == {name: hashlib.sha256(folder.read_bytes(name)).hexdigest() for name in names}


def test_trained_trunk(verify):
    """A trunk that has changed is what training is for, and is counted."""
    report = verify(flip_bit(TRUNK, "lm_head.weight"))
    assert report["ok"]
    assert report["trunk"]["changed"] == 2


@pytest.mark.parametrize(
    "name", [MTP, BIAS, "mtp.layers.0.enorm.weight", "mtp.layers.1.final_layernorm.weight"]
)
def test_one_bit_of_an_mtp_tensor(verify, name):
    """The smallest change there is fails, in weights, norms and buffers."""
    report = verify(flip_bit(name))
    assert not report["ok"]
    assert report["mtp"]["differing"] == [name]
    assert report["mtp"]["identical"] == 21


@pytest.mark.parametrize("chunk", [13, 64])
def test_last_byte_behind_many_pieces(verify, monkeypatch, chunk):
    """A change in the last of many pieces is found, in MTP and in the trunk."""
    monkeypatch.setattr(folder_module, "CHUNK_BYTES", chunk)
    report = verify(flip_bit("mtp.layers.0.enorm.weight", "backbone.norm_f.weight"))
    assert report["mtp"]["differing"] == ["mtp.layers.0.enorm.weight"]
    assert report["trunk"]["changed"] == 1


def test_every_mtp_tensor_is_looked_at(nemotron_h, tmp_path):
    """Whichever tensor is spoilt, that one is named."""
    names = [name for name in open_folder(nemotron_h).tensors if name.startswith("mtp.")]
    export = write_changed(nemotron_h, tmp_path / "export", flip_bit(*names))
    assert sorted(verify_folders(nemotron_h, export).to_json()["mtp"]["differing"]) == sorted(names)


def test_dropped_mtp_tensor(verify):
    """It is missing, and its layer no longer complete."""
    report = verify(drop(MTP))
    assert not report["ok"]
    assert report["mtp"]["missing"] == [MTP]
    assert report["config"] == {"declared": 1, "physical": 1, "written": 0}


def test_dropped_heads(verify):
    """All heads gone while the configuration still counts them."""
    report = verify(drop("mtp."))
    assert not report["ok"]
    assert len(report["mtp"]["missing"]) == report["mtp"]["tensors"] == 22
    assert report["config"] == {"declared": 1, "physical": 0, "written": 0}


def test_dropped_heads_and_count(verify):
    """Heads gone and the configuration made to agree: consistent, and still not the source's."""
    report = verify(drop("mtp."), config={"num_nextn_predict_layers": 0})
    assert not report["ok"]
    assert report["config"] == {"declared": 0, "physical": 0, "written": 0}


def test_added_mtp_tensor(verify):
    """Nothing may be added to the heads."""
    report = verify(add=(("mtp.layers.0.extra.weight", "U8", (1,), b"x"),))
    assert not report["ok"]
    assert report["mtp"]["unexpected"] == ["mtp.layers.0.extra.weight"]


def test_renamed_mtp_tensor(verify):
    """The right bytes under the wrong name are lost to every reader."""
    report = verify(rename(MTP, MTP + "_scale"))
    assert not report["ok"]
    assert report["mtp"]["missing"] == [MTP]
    assert report["mtp"]["unexpected"] == [MTP + "_scale"]


@pytest.mark.parametrize("change", [retype(MTP, "F16"), reshape(MTP, 32 * 32)])
def test_same_bytes_called_something_else(verify, change):
    """Dtype and shape are part of a tensor."""
    report = verify(change)
    assert not report["ok"]
    assert report["mtp"]["differing"] == [MTP]


def test_dropped_trunk_tensor(verify):
    """A trunk has to be whole."""
    report = verify(drop(TRUNK))
    assert not report["ok"]
    assert report["trunk"]["missing"] == [TRUNK]


def test_added_trunk_tensor(verify):
    """And nothing else."""
    report = verify(add=(("backbone.extra", "U8", (1,), b"x"),))
    assert not report["ok"]
    assert report["trunk"]["unexpected"] == ["backbone.extra"]


@pytest.mark.parametrize("change", [retype(TRUNK, "F16"), reshape(TRUNK, 32 * 32)])
def test_trunk_of_another_dtype_or_shape(verify, change):
    """Training changes values only."""
    report = verify(change)
    assert not report["ok"]
    assert report["trunk"]["mismatched"] == [TRUNK]


@pytest.mark.parametrize("declared", [0, 2, None])
def test_config_that_counts_otherwise(verify, declared):
    """All tensors are right, and the export is wrong all the same."""
    report = verify(config={"num_nextn_predict_layers": declared})
    assert report["mtp"]["identical"] == 22
    assert not report["ok"]
    assert report["config"] == {"declared": declared or 0, "physical": 1, "written": 1}
    assert report["config_changed"] == ["num_nextn_predict_layers"]


def test_other_fields_of_the_configuration_are_listed(verify, tmp_path):
    """They may change, as the library's version does; whoever ships the export can see which have."""
    report = verify(config={"rope_theta": 5, "made_by": "a trainer", "bos_token_id": True})
    assert report["ok"]
    assert report["config_changed"] == ["bos_token_id", "made_by", "rope_theta"]


def test_fields_of_a_model_inside_another(tmp_path):
    """A language model's configuration inside a larger one is compared field by field."""
    folders = [write_golden(tmp_path / name, "qwen3_5_vl") for name in ("source", "export")]
    config = json.loads((folders[1] / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 1e-3
    (folders[1] / "config.json").write_text(json.dumps(config))
    assert verify_folders(*folders).config_changed == ("text_config.rms_norm_eps",)


def test_source_that_contradicts_itself(mimo, tmp_path):
    """Declared heads that not even the source has are no success."""
    source = write_changed(mimo, tmp_path / "source", drop("model.mtp_layers."))
    export = write_changed(source, tmp_path / "export")
    report = verify_folders(source, export).to_json()
    assert not report["ok"]
    assert report["source_config"] == {"declared": 2, "physical": 0, "written": 0}


def test_source_without_heads(tmp_path):
    """A proof about nothing is refused."""
    source = tiny.write_mimo(tmp_path / "source", num_mtp=0, tokenizer=False)
    with pytest.raises(CheckpointError, match="nothing about them can be verified"):
        verify_folders(source, write_changed(source, tmp_path / "export"))


def test_folders_of_two_families(nemotron_h, mimo):
    """Both families are in the message."""
    with pytest.raises(CheckpointError, match=r"'mimo'.*'nemotron_h'"):
        verify_folders(nemotron_h, mimo)


def test_unknown_family(tmp_path):
    """A folder whose MTP tensors we could not tell from its trunk is refused."""
    folder = write_folder(
        tmp_path / "f", {"model.safetensors": {"a": ("U8", [1], b"a")}}, config='{"model_type": "llama"}'
    )
    with pytest.raises(UnsupportedModelError, match="llama"):
        verify_folders(folder, folder)


EMBED = "model.embed_tokens.weight"

# A family that writes the embedding once more into its MTP layer, beside a tensor that only looks so.
COPYING = Family(
    ("copying",),
    mark="mtp.",
    layer="mtp.layers.{depth}.",
    shared=("mtp.embed", "mtp.head", "mtp.norm"),
    copies=(("mtp.embed", "embedding"), ("mtp.head", "output"), ("mtp.gone", "embedding")),
)


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """A function that compares a copying family's source with an export of these tensors."""
    monkeypatch.setattr("torpor.checkpoints.families.FAMILIES", (COPYING,))
    config = '{"model_type": "copying", "num_nextn_predict_layers": 1}'
    source = {EMBED: b"1111", "mtp.embed": b"1111", "mtp.head": b"2222", "mtp.norm": b"3333"}

    def write(name, tensors):
        typed = {key: ("U8", [4], data) for key, data in tensors.items()}
        return open_folder(write_folder(tmp_path / name, {"model.safetensors": typed}, config=config))

    return lambda **changes: compare_folders(
        write("source", source),
        write(
            "export",
            source | {(key.replace("_", ".") if "_" in key else EMBED): changes[key] for key in changes},
        ),
        COPYING,
    ).to_json()


def test_copies_follow_the_trained_trunk(compare):
    """What was the trunk's in the source is the new trunk's in the export; the look-alike stays."""
    report = compare(embed=b"9999", mtp_embed=b"9999")
    assert report["ok"]
    assert report["copies"] == {"tensors": 1, "stale": []}
    assert report["mtp"]["tensors"] == 2
    assert report["trunk"]["changed"] == 1


def test_copy_that_stayed_behind(compare):
    """A copy that is still the old trunk's is stale."""
    report = compare(embed=b"9999")
    assert not report["ok"]
    assert report["copies"]["stale"] == ["mtp.embed"]
    assert report["mtp"]["identical"] == 2


def test_look_alike_is_no_copy(compare):
    """By its name it could be one; by its bytes it is an MTP tensor, and must not follow the trunk."""
    report = compare(embed=b"9999", mtp_embed=b"9999", mtp_head=b"9999")
    assert not report["ok"]
    assert report["mtp"]["differing"] == ["mtp.head"]


def test_known_families_write_no_copies(nemotron_h, mimo):
    """Neither of the two lists a candidate."""
    for path in (nemotron_h, mimo):
        folder = open_folder(path)
        assert not family_of(folder).copy_candidates(folder.tensors, folder.config)


def test_memory_is_bounded(tmp_path, monkeypatch):
    """Tensors far larger than a piece are compared within a few pieces' memory, MTP and trunk."""
    monkeypatch.setattr(folder_module, "CHUNK_BYTES", 2**16)
    size = 2**24
    tensors = {name: ("U8", [size], bytes(size)) for name in ("model.mtp_layers.0.x", "model.x")}
    config = (
        '{"model_type": "mimo", "num_nextn_predict_layers": 1, "hidden_size": 8, "intermediate_size": 8,'
        ' "num_attention_heads": 1}'
    )
    for name in ("source", "export"):
        write_folder(tmp_path / name, {"model.safetensors": tensors}, config=config)
    del tensors
    tracemalloc.start()
    try:
        result = verify_folders(tmp_path / "source", tmp_path / "export")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (result.mtp_names("identical"), result.trunk_changed) == (["model.mtp_layers.0.x"], 0)
    assert peak < size / 8


def test_progress(nemotron_h, tmp_path):
    """It only grows, and ends at the source's size."""
    seen = []
    export = write_changed(nemotron_h, tmp_path / "export")
    verify_folders(nemotron_h, export, lambda done, total: seen.append((done, total)))
    total = sum(entry.nbytes for entry in open_folder(nemotron_h).tensors.values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert len(seen) == 55


def test_no_torch(nemotron_h):
    """Raw bytes are all that is needed: neither torch nor numpy is loaded."""
    code = (
        "import sys\n"
        "from torpor.checkpoints.verify import verify_folders\n"
        "assert verify_folders(sys.argv[1], sys.argv[1]).ok\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'safetensors') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(nemotron_h)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def quantise(*kept):
    """A change that packs the trunk's projections as FP8 beside their scales, all but these."""

    def change(tensors):
        for name, (_, shape, data) in list(tensors.items()):
            if name.startswith("model.layers.") and name.endswith("_proj.weight") and name not in kept:
                tensors[name] = ("F8_E4M3", shape, data[::2])
                tensors[f"{name}_scale_inv"] = ("F32", [1, 1], bytes(4))
        return tensors

    return change


FP8 = {"quant_method": "fp8", "modules_to_not_convert": ["mtp"]}


def test_quantised_export(tmp_path):
    """A trunk that was quantised is whole, under other dtypes and with scales; its heads are excluded."""
    source = write_golden(tmp_path / "source", "qwen3_5")
    export = write_golden(tmp_path / "export", "qwen3_5", change=quantise(), quantization_config=FP8)
    report = verify_folders(source, export).to_json()
    assert report["ok"], report
    assert report["trunk"]["changed"] > 10
    # And back: an export in plain weights of a quantised source.
    back = verify_folders(export, source).to_json()
    assert back["ok"], back


def test_quantised_export_that_lost_a_weight(tmp_path):
    """Quantisation excuses a weight's dtype, not its absence."""
    source = write_golden(tmp_path / "source", "qwen3_5")
    lost = "model.layers.1.self_attn.q_proj.weight"
    export = write_golden(
        tmp_path / "export",
        "qwen3_5",
        change=lambda t: {n: v for n, v in quantise()(t).items() if not n.startswith(lost)},
        quantization_config=FP8,
    )
    report = verify_folders(source, export).to_json()
    assert not report["ok"]
    assert report["trunk"]["missing"] == [lost]


def test_lost_scale(tmp_path):
    """Beside a weight that is still quantised its scale is needed."""
    source = write_golden(tmp_path / "source", "qwen3_5", change=quantise(), quantization_config=FP8)
    lost = "model.layers.1.self_attn.q_proj.weight_scale_inv"
    export = write_changed(source, tmp_path / "export", drop(lost))
    report = verify_folders(source, export).to_json()
    assert not report["ok"]


def test_heads_that_are_not_excluded(tmp_path):
    """Right bytes that a server would read wrongly are no success."""
    source = write_golden(tmp_path / "source", "qwen3_5")
    config = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
    export = write_golden(tmp_path / "export", "qwen3_5", change=quantise(), quantization_config=config)
    report = verify_folders(source, export).to_json()
    assert not report["ok"]
    assert "does not exclude them, first mtp.fc" in report["quantization"]["problems"][0]


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_every_family(tmp_path, name):
    """A sound export passes; with one bit of an MTP tensor flipped it does not, nor with stale copies."""
    manifest = read_manifest(name)
    source = write_golden(tmp_path / "source", name)

    def train(tensors):
        new = golden_tensors(name, seed=1)
        trained = {n: new[n] if n in manifest["trunk"] else v for n, v in tensors.items()}
        return trained | {copy: new[of] for copy, of in manifest["copies"].items()}

    export = write_golden(tmp_path / "export", name, change=train)
    result = verify_folders(source, export)
    assert result.ok
    assert set(result.copies) == manifest["copies"].keys()
    assert result.trunk_changed == sum(not said.startswith("I64") for said in manifest["trunk"].values())
    for i, lost in enumerate(manifest["mtp"]):
        if i % 7:
            continue
        damaged = write_changed(export, tmp_path / f"damaged{i}", flip_bit(lost))
        report = verify_folders(source, damaged).to_json()
        assert not report["ok"]
        assert lost in report["mtp"]["differing"] + report["copies"]["stale"]
    if manifest["copies"]:
        stale = write_golden(
            tmp_path / "stale",
            name,
            change=lambda t: train(t) | {copy: t[copy] for copy in manifest["copies"]},
        )
        assert verify_folders(source, stale).stale_copies == tuple(sorted(manifest["copies"]))
