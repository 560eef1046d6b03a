"""An inspection tells what is there, what is missing and who can use it, from headers alone."""

import json
import subprocess
import sys

import pytest

from golden_folders import GOLDEN_NAMES, read_manifest, write_golden
from torpor.checkpoints.folder import Folder
from torpor.checkpoints.inspect import inspect_folder
from torpor.errors import UnsupportedModelError


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_sound_folder(tmp_path, name):
    """Nothing to complain of in any family; the numbers are the manifest's."""
    result = inspect_folder(write_golden(tmp_path / "f", name))
    manifest, report = read_manifest(name), result.to_json()
    assert result.ok, result.problems
    assert report["mtp_tensors"] == len(manifest["mtp"])
    assert report["copies"] == list(manifest["copies"])
    assert report["missing"] == report["problems"] == []
    assert report["physical"] == report["written"] == len(report["layers"])
    assert report["mtp_bytes"] == sum(layer["bytes"] for layer in report["layers"])
    json.dumps(report)


@pytest.mark.parametrize("name", [name for name in GOLDEN_NAMES if name != "minimax_m2"])
def test_lost_heads(tmp_path, name):
    """Every family whose models come with heads is told apart from one that lost them, with what to do."""
    folder = write_golden(tmp_path / "f", name, heads=False)
    result = inspect_folder(folder)
    assert not result.ok
    assert f"torpor graft --heads SOURCE --trunk {folder}" in result.problems[0]
    assert "with method mtp it fails to start" in result.consumers["vLLM"]


def test_three_numbers_and_the_missing_names(tmp_path):
    """Declared, existing, complete; and every missing tensor by name."""
    lost = "mtp.layers.0.self_attn.q_proj.weight"
    folder = write_golden(
        tmp_path / "f", "qwen3_5", change=lambda t: {n: v for n, v in t.items() if n != lost}
    )
    report = inspect_folder(folder).to_json()
    assert not report["ok"]
    assert (report["declared"], report["physical"], report["written"]) == (1, 1, 0)
    assert report["missing"] == [lost]
    assert "declares 1 MTP layers (mtp_num_hidden_layers), 1 exist, 0 are complete" in report["problems"][0]


def test_undeclared_heads(tmp_path):
    """Heads that config.json says are not there."""
    result = inspect_folder(write_golden(tmp_path / "f", "qwen3_5", mtp_num_hidden_layers=0))
    assert "declares 0 MTP layers" in result.problems[0]
    assert "Make mtp_num_hidden_layers say what is there" in result.problems[0]


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5", "mimo", "nemotron_h"])
def test_heads_of_another_width(tmp_path, name):
    """Complete by name, and made for a model of half the hidden size."""

    def halve(tensors):
        heads = read_manifest(name)["mtp"].keys() - read_manifest(name)["copies"].keys()
        halved = {}
        for tensor, (dtype, shape, data) in tensors.items():
            if tensor in heads and shape:
                shape, data = [shape[0] // 2, *shape[1:]], data[: len(data) // 2]
            halved[tensor] = (dtype, shape, data)
        return halved

    result = inspect_folder(write_golden(tmp_path / "f", name, change=halve))
    assert any("hidden_size 64 needs [64" in problem for problem in result.problems)


def test_headers_only(tmp_path, monkeypatch):
    """No tensor's bytes are read."""

    def refuse(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Folder, "iter_bytes", refuse)
    assert inspect_folder(write_golden(tmp_path / "f", "deepseek_v3")).ok


def test_copy_that_was_left_behind(tmp_path):
    """The trunk's vocabulary has grown, the copy inside the MTP layer has not."""

    def grow(tensors):
        dtype, shape, data = tensors["model.embed_tokens.weight"]
        grown = (dtype, [shape[0] * 2, shape[1]], data * 2)
        return tensors | {"model.embed_tokens.weight": grown}

    result = inspect_folder(write_golden(tmp_path / "f", "deepseek_v3", change=grow))
    assert len(result.problems) == 1
    assert "model.layers.3.embed_tokens.weight has shape [128, 64]" in result.problems[0]
    assert "[256, 64]" in result.problems[0]


def quantise_trunk(tensors):
    """Pack the trunk's projections and leave the heads plain, as quantisers do."""
    packed = {}
    for name, (dtype, shape, data) in tensors.items():
        if name.startswith("model.layers.") and name.endswith("_proj.weight"):
            packed[f"{name}_packed"] = ("U8", [len(data) // 4], data[::4])
            packed[f"{name}_scale"] = ("F32", [1], bytes(4))
        else:
            packed[name] = (dtype, shape, data)
    return packed


@pytest.mark.parametrize(
    ("quantization", "ok"),
    [
        ({"quant_method": "compressed-tensors", "ignore": []}, False),
        ({"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*mtp.*"]}, True),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*visual.*"]}, False),
        ({"quant_method": "compressed-tensors", "ignore": ["re:["]}, False),
        ({"quant_method": "modelopt", "ignore": ["mtp*"]}, True),
        ({"quant_method": "modelopt", "exclude_modules": ["mtp.*"]}, True),
        ({"quant_method": "modelopt", "exclude_modules": ["mtp.layers.0.*"]}, False),
        ({"quant_method": "fp8", "modules_to_not_convert": ["mtp"]}, True),
        ({"quant_method": "fp8", "ignored_layers": ["mtp.fc", "mtp.layers.0"]}, True),
        ({"quant_method": "fp8"}, False),
        ({"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["mtp.layers"]}, False),
        ({"quant_method": "homemade"}, False),
        ({"quant_method": "fp8", "modules_to_not_convert": "mtp"}, False),
    ],
)
def test_plain_heads_in_a_quantised_folder(tmp_path, quantization, ok):
    """They have to be excluded by name, in the words of the method."""
    folder = write_golden(tmp_path / "f", "qwen3_5", change=quantise_trunk, quantization_config=quantization)
    result = inspect_folder(folder)
    assert result.ok == ok, result.problems


def test_published_mix_of_quantised_and_plain(tmp_path):
    """FP8 models are published with plain routers and projections in their heads, excluded nowhere."""

    def quantise(tensors):
        for name, (_, shape, data) in list(tensors.items()):
            if name.startswith("model.layers.") and name.endswith("_proj.weight") and "eh_proj" not in name:
                tensors[name] = ("F8_E4M3", shape, data[::2])
                tensors[f"{name}_scale_inv"] = ("F32", [1, 1], bytes(4))
        return tensors

    def forget_one(tensors):
        tensors = quantise(tensors)
        name = "model.layers.3.self_attn.o_proj.weight"
        _, shape, data = tensors[name]
        del tensors[f"{name}_scale_inv"]
        return tensors | {name: ("BF16", shape, data * 2)}

    fp8 = {"quant_method": "fp8"}
    folder = write_golden(tmp_path / "f", "deepseek_v3", change=quantise, quantization_config=fp8)
    assert inspect_folder(folder).problems == ()
    folder = write_golden(tmp_path / "g", "deepseek_v3", change=forget_one, quantization_config=fp8)
    assert (
        "does not exclude them, first model.layers.3.self_attn.o_proj" in inspect_folder(folder).problems[0]
    )


def test_model_optimizers_own_file(tmp_path):
    """hf_quant_config.json is read too, and has to exclude them as well."""
    config = {"quant_method": "modelopt", "ignore": ["mtp*"]}
    folder = write_golden(tmp_path / "f", "qwen3_5", change=quantise_trunk, quantization_config=config)
    own = folder / "hf_quant_config.json"
    own.write_text('{"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}')
    assert "hf_quant_config.json does not exclude them" in inspect_folder(folder).problems[0]
    own.write_text('{"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "mtp*"]}}')
    assert inspect_folder(folder).ok


def test_quantised_heads(tmp_path):
    """FP8 heads beside their scales must not be excluded, and need a quantization_config."""

    def quantise(tensors):
        name = "mtp.fc.weight"
        _, shape, data = tensors[name]
        scale = ("F32", [1, 1], bytes(4))
        return tensors | {name: ("F8_E4M3", shape, data[::2]), name + "_scale_inv": scale}

    sound = {"quant_method": "fp8", "modules_to_not_convert": ["mtp.layers", "lm_head"]}
    folder = write_golden(tmp_path / "a", "qwen3_5", change=quantise, quantization_config=sound)
    assert inspect_folder(folder).problems == ()
    wrong = {"quant_method": "fp8", "modules_to_not_convert": ["mtp"]}
    folder = write_golden(tmp_path / "b", "qwen3_5", change=quantise, quantization_config=wrong)
    assert "excludes them, first mtp.fc" in inspect_folder(folder).problems[0]
    folder = write_golden(tmp_path / "c", "qwen3_5", change=quantise)
    assert "no quantization_config" in inspect_folder(folder).problems[0]


def test_unknown_family(tmp_path):
    """Refused, and what looks like MTP is named."""
    with pytest.raises(UnsupportedModelError, match="look like MTP"):
        inspect_folder(write_golden(tmp_path / "f", "qwen3_5", model_type="qwen9"))


def test_no_torch(tmp_path):
    """Neither torch nor numpy is loaded."""
    code = (
        "import sys\n"
        "from torpor.checkpoints.inspect import inspect_folder\n"
        "assert inspect_folder(sys.argv[1]).ok\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'safetensors') if name in sys.modules])\n"
    )
    folder = write_golden(tmp_path / "f", "glm4_moe")
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
