"""A graft puts lost heads back, byte for byte, with copies of the tuned trunk; readers accept the folder."""

import hashlib
import json
import os
import shutil

import pytest

import tiny
from golden_folders import GOLDEN_NAMES, golden_tensors, read_manifest, write_golden
from sabotage import drop, write_changed
from torpor.checkpoints import folder as folder_module
from torpor.checkpoints.families import check_heads
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.graft import graft_folder
from torpor.checkpoints.inspect import inspect_folder
from torpor.checkpoints.verify import verify_folders
from torpor.errors import CheckpointError, UnsupportedModelError

TRAINED = 1  # seed of the tuned trunk's values


def fingerprint(path):
    """Every file of a folder and its bytes."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


def write_pair(tmp_path, name, **tuned):
    """A source with heads, and a folder tuned from it that lost them."""
    source = write_golden(tmp_path / "source", name)
    return source, write_golden(tmp_path / "tuned", name, seed=TRAINED, heads=False, **tuned)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_every_family(tmp_path, name):
    """Heads from the one folder, trunk and copies from the other, and everybody is content."""
    source, tuned = write_pair(tmp_path, name)
    before = fingerprint(source), fingerprint(tuned)
    result = graft_folder(source, tuned, tmp_path / "out")
    out, manifest = open_folder(tmp_path / "out"), read_manifest(name)
    assert out.tensors.keys() == manifest["trunk"].keys() | manifest["mtp"].keys()
    old, new = golden_tensors(name), golden_tensors(name, TRAINED)
    for tensor in out.tensors:
        wanted = new if tensor in manifest["trunk"] or tensor in manifest["copies"] else old
        assert out.read_bytes(tensor) == wanted[tensor][2], tensor
    check_heads(out)
    assert inspect_folder(out.path).ok
    report = verify_folders(source, out.path)
    assert report.ok
    assert set(report.copies) == manifest["copies"].keys() == set(result.copies)
    assert (fingerprint(source), fingerprint(tuned)) == before
    assert result.config_changes == ()
    assert (out.path / "config.json").read_bytes() == (tuned / "config.json").read_bytes()
    assert (out.path / "tokenizer.json").read_bytes() == (tuned / "tokenizer.json").read_bytes()


def test_only_the_heads_are_written(tmp_path):
    """The trunk's file is the tuned folder's, or shares its blocks; the new file holds the heads alone."""
    source, tuned = write_pair(tmp_path, "qwen3_5")
    result = graft_folder(source, tuned, tmp_path / "out")
    trunk, heads = sorted((tmp_path / "out").glob("*.safetensors"))
    size = (tuned / "model.safetensors").stat().st_size
    assert "copied" not in result.placed_bytes
    assert sum(result.placed_bytes.values()) == size == trunk.stat().st_size
    if "hard-linked" in result.placed_bytes:
        assert trunk.samefile(tuned / "model.safetensors")
    assert result.written_bytes == sum(open_folder(source).tensors[name].nbytes for name in result.mtp)
    assert heads.stat().st_size - result.written_bytes < 2**14


def test_where_nothing_can_be_linked(tmp_path, monkeypatch):
    """Another file system: the bytes are copied, and come out the same."""

    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(folder_module.fcntl, "ioctl", refuse)
    source, tuned = write_pair(tmp_path, "qwen3_5")
    result = graft_folder(source, tuned, tmp_path / "out")
    assert list(result.placed_bytes) == ["copied"]
    assert verify_folders(source, tmp_path / "out").ok


def test_shards_and_a_download_cache(tmp_path):
    """A sharded trunk whose files are links into a cache's blobs."""
    source = tiny.write_nemotron_h(tmp_path / "source", tokenizer=False)
    written = write_changed(source, tmp_path / "written", drop("mtp."))
    blobs, tuned = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    tuned.mkdir(parents=True)
    for file in written.iterdir():
        shutil.move(file, blobs / f"blob-{file.name}")
        (tuned / file.name).symlink_to(blobs / f"blob-{file.name}")
    graft_folder(source, tuned, tmp_path / "out")
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
    assert verify_folders(source, tmp_path / "out").ok


def test_heads_that_are_there_in_part(tmp_path):
    """What a tuned folder kept is left where it is, and only the rest is written."""
    source = write_golden(tmp_path / "source", "deepseek_v3")
    tensors = golden_tensors("deepseek_v3", TRAINED)
    kept = {"model.layers.3.eh_proj.weight": golden_tensors("deepseek_v3")["model.layers.3.eh_proj.weight"]}
    kept["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tuned = write_golden(
        tmp_path / "tuned", "deepseek_v3", seed=TRAINED, heads=False, change=lambda t: t | kept
    )
    result = graft_folder(source, tuned, tmp_path / "out")
    assert set(result.kept) == set(kept)
    assert verify_folders(source, tmp_path / "out").ok


@pytest.mark.parametrize("stale", ["model.layers.3.eh_proj.weight", "model.layers.3.embed_tokens.weight"])
def test_other_heads_are_not_overwritten(tmp_path, stale):
    """A trained head, or a copy that did not follow its trunk, is somebody's: refused by name."""
    source = write_golden(tmp_path / "source", "deepseek_v3")
    other = golden_tensors("deepseek_v3", seed=7)[stale]
    tuned = write_golden(
        tmp_path / "tuned", "deepseek_v3", seed=TRAINED, heads=False, change=lambda t: t | {stale: other}
    )
    with pytest.raises(CheckpointError, match=f"has {stale} already"):
        graft_folder(source, tuned, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_to_graft(tmp_path):
    """A folder that has its heads needs no others."""
    source = write_golden(tmp_path / "source", "qwen3_5")
    with pytest.raises(CheckpointError, match="nothing to graft"):
        graft_folder(source, source, tmp_path / "out")


def test_heads_of_another_generation(tmp_path):
    """MTP tensors that the source does not know are neither kept nor removed."""
    source, _ = write_pair(tmp_path, "qwen3_5")
    extra = {"mtp.layers.7.q.weight": ("U8", [1], b"x")}
    tuned = write_golden(tmp_path / "other", "qwen3_5", heads=False, change=lambda t: t | extra)
    with pytest.raises(CheckpointError, match=r"1 MTP tensors that .* lacks, first mtp\.layers\.7"):
        graft_folder(source, tuned, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "lost", "changes"),
    [
        ("qwen3_5", {"mtp_num_hidden_layers": None}, {"mtp_num_hidden_layers"}),
        ("qwen3_5", {"mtp_num_hidden_layers": 0}, {"mtp_num_hidden_layers"}),
        ("deepseek_v3", {"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers"}),
        (
            "deepseek_v3",
            {"num_nextn_predict_layers": None, "num_mtp_layers": 0},
            {"num_nextn_predict_layers", "num_mtp_layers"},
        ),
        ("nemotron_h", {"mtp_hybrid_override_pattern": None}, {"mtp_hybrid_override_pattern"}),
        (
            "nemotron_h",
            {"mtp_layers_block_type": ["mlp"], "mtp_hybrid_override_pattern": None},
            {"mtp_layers_block_type", "mtp_hybrid_override_pattern"},
        ),
        (
            "nemotron_h",
            {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "M"},
            {"mtp_layers_block_type", "mtp_hybrid_override_pattern"},
        ),
        (
            "minimax_m2",
            {"use_mtp": False, "num_mtp_modules": None, "mtp_transformer_layers": None},
            {"use_mtp", "num_mtp_modules", "mtp_transformer_layers"},
        ),
    ],
)
def test_configuration_is_mended(tmp_path, name, lost, changes):
    """Whatever a trainer did to the fields that describe the heads, they say what the source says."""
    source, tuned = write_pair(tmp_path, name, **lost)
    result = graft_folder(source, tuned, tmp_path / "out")
    assert set(result.config_changes) == changes
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == read_manifest(name)["config"]
    assert inspect_folder(tmp_path / "out").ok


def test_nested_configuration_is_mended(tmp_path):
    """Inside a vision-language model the count lies beside the language model's other fields."""
    source, tuned = write_pair(tmp_path, "qwen3_5_vl")
    config = json.loads((tuned / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 0
    (tuned / "config.json").write_text(json.dumps(config))
    graft_folder(source, tuned, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == read_manifest("qwen3_5_vl")["config"]


def test_language_model_taken_out_of_a_larger_one(tmp_path):
    """The text part of a vision-language model, saved alone under shorter names, gets its heads back."""
    source = write_golden(tmp_path / "source", "qwen3_5_vl")
    tuned = write_golden(tmp_path / "tuned", "qwen3_5", seed=TRAINED, heads=False)
    graft_folder(source, tuned, tmp_path / "out")
    out = open_folder(tmp_path / "out")
    assert (
        out.tensors.keys()
        == read_manifest("qwen3_5")["trunk"].keys() | read_manifest("qwen3_5")["mtp"].keys()
    )
    assert inspect_folder(out.path).ok


def test_numbered_heads_follow_the_trunks_prefix(tmp_path):
    """Heads that lie among the trunk's layers lie there whatever the trunk is wrapped in."""

    def wrap(tensors):
        return {name.replace("model.", "language_model.model.", 1): data for name, data in tensors.items()}

    source, tuned = write_pair(tmp_path, "glm4_moe", change=wrap)
    graft_folder(source, tuned, tmp_path / "out")
    out = open_folder(tmp_path / "out")
    assert "language_model.model.layers.3.eh_proj.weight" in out.tensors
    check_heads(out)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_other_sizes(tmp_path, field):
    """A trunk of another size is refused, with both values."""
    source, tuned = write_pair(tmp_path, "mimo", **{field: 7})
    with pytest.raises(CheckpointError, match=f"{field} 7, .* has {read_manifest('mimo')['config'][field]}"):
        graft_folder(source, tuned, tmp_path / "out")


def test_other_shapes(tmp_path):
    """What config.json does not show is seen in the shapes: a pruned MLP, a grown vocabulary."""

    def halve(tensors):
        name = "model.layers.1.mlp.down_proj.weight"
        dtype, (rows, columns), data = tensors[name]
        return tensors | {name: (dtype, [rows, columns // 2], data[: len(data) // 2])}

    source, tuned = write_pair(tmp_path, "mimo", change=halve)
    with pytest.raises(
        CheckpointError, match=r"down_proj.weight in .* has shape \[64, 48\], in .* \[64, 96\]"
    ):
        graft_folder(source, tuned, tmp_path / "out")


def test_trunk_that_is_not_whole(tmp_path):
    """A missing tensor is named."""
    lost = "model.layers.2.self_attn.o_proj.weight"
    source, tuned = write_pair(tmp_path, "mimo", change=lambda t: {n: v for n, v in t.items() if n != lost})
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors .* first {lost}"):
        graft_folder(source, tuned, tmp_path / "out")


def test_other_family(tmp_path):
    """Both are named."""
    source = write_golden(tmp_path / "source", "qwen3_5")
    tuned = write_golden(tmp_path / "tuned", "qwen3_next", heads=False)
    with pytest.raises(CheckpointError, match=r"is a qwen3_next, .* a qwen3_5"):
        graft_folder(source, tuned, tmp_path / "out")


def test_source_without_or_with_half_its_heads(tmp_path):
    """Heads that are not whole are put nowhere."""
    _, tuned = write_pair(tmp_path, "qwen3_5")
    with pytest.raises(CheckpointError, match="has no MTP layers"):
        graft_folder(tuned, tuned, tmp_path / "out")
    half = write_golden(
        tmp_path / "half", "qwen3_5", change=lambda t: {n: v for n, v in t.items() if n != "mtp.fc.weight"}
    )
    with pytest.raises(CheckpointError, match=r"0 are complete\n.*first mtp\.fc\.weight"):
        graft_folder(half, tuned, tmp_path / "out")


def test_adapter_that_was_not_merged(tmp_path):
    """Told from a model, with the call that merges it."""
    source, _ = write_pair(tmp_path, "qwen3_5")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"LoRA adapter(.|\n)*merge_and_unload"):
        graft_folder(source, adapter, tmp_path / "out")


def quantise_trunk(tensors):
    """Pack the trunk's projections, as quantisers do with a folder whose heads are gone."""
    packed = {}
    for name, (dtype, shape, data) in tensors.items():
        if ".layers." in name and name.endswith("_proj.weight"):
            packed[f"{name}_packed"] = ("U8", [len(data) // 4], data[::4])
            packed[f"{name}_scale"] = ("F32", [1], bytes(4))
        else:
            packed[name] = (dtype, shape, data)
    return packed


@pytest.mark.parametrize(
    ("quantization", "key", "added"),
    [
        ({"quant_method": "compressed-tensors", "ignore": ["lm_head"]}, "ignore", ["re:^{}.*"]),
        ({"quant_method": "modelopt", "ignore": ["lm_head"]}, "ignore", ["{}*"]),
        ({"quant_method": "modelopt", "exclude_modules": ["lm_head"]}, "exclude_modules", ["{}*"]),
        ({"quant_method": "fp8"}, "modules_to_not_convert", None),
        ({"quant_method": "awq", "modules_to_not_convert": ["lm_head"]}, "modules_to_not_convert", None),
        (
            {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"]},
            "llm_int8_skip_modules",
            None,
        ),
    ],
)
@pytest.mark.parametrize(
    ("name", "prefix"), [("qwen3_5", "mtp."), ("qwen3_5_vl", "mtp."), ("deepseek_v3", "model.layers.3.")]
)
def test_quantised_trunk(tmp_path, name, prefix, quantization, key, added):
    """Plain heads stay plain, and the quantisation configuration says so in the words of its method."""
    source, tuned = write_pair(tmp_path, name, change=quantise_trunk, quantization_config=quantization)
    graft_folder(source, tuned, tmp_path / "out")
    assert inspect_folder(tmp_path / "out").ok
    excluded = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][key]
    before = quantization.get(key, [])
    assert excluded[: len(before)] == before
    new = excluded[len(before) :]
    if added:
        assert new == [
            pattern.format(prefix.replace(".", "\\.") if "re:" in pattern else prefix) for pattern in added
        ]
    else:
        assert new
        assert all(module.startswith(prefix) for module in new)
        assert any(module.endswith("o_proj") for module in new)
    assert verify_folders(source, tmp_path / "out").ok


def test_model_optimizers_own_file_is_mended(tmp_path):
    """It is read instead of config.json by some servers."""
    source, tuned = write_pair(tmp_path, "qwen3_5", change=quantise_trunk)
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}
    (tuned / "hf_quant_config.json").write_text(json.dumps(own))
    graft_folder(source, tuned, tmp_path / "out")
    mended = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert mended["producer"] == own["producer"]
    assert mended["quantization"] == {"quant_algo": "NVFP4", "exclude_modules": ["mtp.*"]}
    assert inspect_folder(tmp_path / "out").ok


def test_unknown_quantisation(tmp_path):
    """Whether plain heads would be read rightly cannot be told."""
    source, tuned = write_pair(
        tmp_path, "qwen3_5", change=quantise_trunk, quantization_config={"quant_method": "homemade"}
    )
    with pytest.raises(UnsupportedModelError, match="'homemade'; known are"):
        graft_folder(source, tuned, tmp_path / "out")


def test_quantised_output_layer(tmp_path):
    """A copy cannot follow a packed original."""

    def pack_output(tensors):
        packed = {n: v for n, v in tensors.items() if n != "lm_head.weight"}
        return packed | {
            "lm_head.weight_packed": ("U8", [1], b"x"),
            "lm_head.weight_scale": ("F32", [1], bytes(4)),
        }

    source, tuned = write_pair(
        tmp_path,
        "deepseek_v3",
        change=pack_output,
        quantization_config={"quant_method": "compressed-tensors"},
    )
    with pytest.raises(
        CheckpointError, match=r"shared_head.head.weight is a copy .* quantised or not at all"
    ):
        graft_folder(source, tuned, tmp_path / "out")


def test_quantised_heads_on_a_plain_trunk(tmp_path):
    """No server reads FP8 heads in a BF16 folder."""

    def quantise(tensors):
        _, shape, data = tensors["mtp.fc.weight"]
        return tensors | {
            "mtp.fc.weight": ("F8_E4M3", shape, data[::2]),
            "mtp.fc.weight_scale_inv": ("F32", [1, 1], bytes(4)),
        }

    fp8 = {"quant_method": "fp8"}
    source = write_golden(tmp_path / "source", "qwen3_5", change=quantise, quantization_config=fp8)
    tuned = write_golden(tmp_path / "tuned", "qwen3_5", seed=TRAINED, heads=False)
    with pytest.raises(CheckpointError, match=r"mtp.fc.weight is quantised \(fp8\) .* not so \(none\)"):
        graft_folder(source, tuned, tmp_path / "out")


def test_tied_trunk_saved_without_its_output_layer(tmp_path):
    """Trainers drop the second of two equal tensors; the copies still find what they copy."""
    tie = {"tie_word_embeddings": True}

    def tied(tensors):
        return tensors | {
            name: tensors["model.embed_tokens.weight"]
            for name in (
                "lm_head.weight",
                "model.layers.3.shared_head.head.weight",
                "model.layers.3.embed_tokens.weight",
            )
            if name in tensors
        }

    source = write_golden(tmp_path / "source", "deepseek_v3", change=tied, **tie)
    tuned = write_golden(
        tmp_path / "tuned",
        "deepseek_v3",
        seed=TRAINED,
        heads=False,
        change=lambda t: {n: v for n, v in t.items() if n != "lm_head.weight"},
        **tie,
    )
    graft_folder(source, tuned, tmp_path / "out")
    out = open_folder(tmp_path / "out")
    embedding = out.read_bytes("model.embed_tokens.weight")
    for name in ("embed_tokens", "shared_head.head"):
        assert out.read_bytes(f"model.layers.3.{name}.weight") == embedding


def test_existing_output(tmp_path):
    """Nothing is overwritten."""
    source, tuned = write_pair(tmp_path, "qwen3_5")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        graft_folder(source, tuned, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_many_tensors_in_one_new_file(tmp_path):
    """The new file is as sound as the others, to a strict reader too."""
    from safetensors import safe_open

    source, tuned = write_pair(tmp_path, "glm4_moe")
    graft_folder(source, tuned, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == open_folder(tmp_path / "out").tensors.keys()
    for file in set(index["weight_map"].values()):
        with safe_open(tmp_path / "out" / file, "np") as opened:
            assert set(opened.keys()) == {n for n, f in index["weight_map"].items() if f == file}


def test_progress(tmp_path):
    """It only grows, and ends at the end."""
    source, tuned = write_pair(tmp_path, "qwen3_5")
    seen = []
    graft_folder(source, tuned, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
