"""Fake quantisation: what is quantised, that its state is kept, and that the export is what was trained."""

import json

import pytest
import torch

import tiny
from tiny_models import same_bytes
from torpor import freeze_mtp
from torpor.checkpoints.families import find_family
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.inspect import inspect_folder
from torpor.checkpoints.quantization import not_excluded
from torpor.checkpoints.verify import verify_folders
from torpor.errors import CheckpointError, ConfigError, MTPChangedError
from torpor.megatron import checkpointing, quantization, quantized_export, weights
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import export_folder, load_weights
from torpor.modelopt import should_freeze_mtp

# Rows of whole blocks.
SIZES = {"mimo": {}, "nemotron_h": {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 32}}
WRITERS = {"mimo": tiny.write_mimo, "nemotron_h": tiny.write_nemotron_h}


@pytest.fixture(scope="module", params=WRITERS)
def source(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / request.param
    WRITERS[request.param](path, dtype=torch.bfloat16, **SIZES[request.param])
    return open_folder(path)


def build(source, dtype=torch.bfloat16, **options):
    chunks = build_model(source.config, Layout(), dtype, **options)
    load_weights(chunks, source)
    return chunks[0]


def forward(model, seed=0):
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
    return model(ids, torch.arange(16).expand(2, -1), None)


def quantize(model, name="fp8", *, with_mtp=False, seed=0):
    """Quantise; in NVFP4 without any forward, which needs CUDA: the scales are made up."""
    calibrate = (lambda: None) if name == "nvfp4" else (lambda: forward(model, seed))
    quantization.fake_quantize(model, name, with_mtp=with_mtp, calibrate=calibrate)
    if name == "nvfp4":
        for module in quantizers(model).values():
            module.amax = torch.tensor(0.5, dtype=torch.bfloat16)
    return model


def quantizers(model):
    from modelopt.torch.quantization.nn import TensorQuantizer

    modules = model.named_modules()
    return {name: m for name, m in modules if isinstance(m, TensorQuantizer) and m.is_enabled}


def scales(model):
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith("_amax")}


def folded(model, source, folder):
    """Hugging Face's weights of an FP32 model, once each quantised one is what its layer computes with."""
    with torch.no_grad():
        for layer in model.modules():
            quantizer = getattr(layer, "weight_quantizer", None)
            if quantizer is not None and quantizer.is_enabled:
                layer.weight.copy_(quantizer(layer.weight))
    live = weights._GlobalTensors(save(model, folder))
    entries = find_family(source.config).name_map(source.config).entries
    return {n: w for e in entries for n, w in zip(e.hf_names, e.op.unpack(live.read(e)), strict=True)}


def spread_rows(model):
    """Make the rows of each matrix of very different sizes: no row's scale can stand for another's."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10 ** (3 * torch.rand(len(parameter), 1, generator=generator) - 2))


def save(model, folder):
    return checkpointing.save_checkpoint(folder / "checkpoints", 1, [model])


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize("name", ["fp8", "int8", "nvfp4"])
def test_the_export_is_the_quantised_trunk_beside_untouched_heads(source, tmp_path, name):
    model = quantize(build(source), name)
    handle = freeze_mtp(model)
    checkpoint = save(model, tmp_path)
    export_folder(checkpoint, source, tmp_path / "export", quantize=name)
    assert handle.check().num_tensors > 0

    result = verify_folders(source.path, tmp_path / "export")
    assert result.ok
    assert result.mtp
    assert result.config_changed == ("quantization_config",)
    report = inspect_folder(tmp_path / "export")
    assert report.ok
    export = open_folder(tmp_path / "export")
    dtype = {"fp8": "F8_E4M3", "int8": "I8", "nvfp4": "U8"}[name]
    packed = sorted(name for name, entry in export.tensors.items() if entry.dtype == dtype)
    # Every quantiser of a weight has its layer in the export, under one name or, fused, under several.
    assert len(packed) >= sum(name.endswith("weight_quantizer") for name in quantizers(model)) > 0
    parts = {"fp8": {"input_scale"}, "int8": set(), "nvfp4": {"input_scale", "weight_scale_2"}}[name]
    beside = {
        f"{weight.removesuffix('weight')}{part}" for weight in packed for part in {"weight_scale"} | parts
    }
    assert export.tensors.keys() == source.tensors.keys() | beside
    in_config = export.config["quantization_config"]
    modules = [name.removesuffix(".weight") for name, entry in source.tensors.items() if len(entry.shape) > 1]
    excluded = set(modules) - set(not_excluded(in_config, modules))
    assert {f"{module}.weight" for module in set(modules) - excluded} == set(packed)
    if name == "int8":
        assert not (tmp_path / "export" / "hf_quant_config.json").exists()
        return
    written = json.loads((tmp_path / "export" / "hf_quant_config.json").read_bytes())["quantization"]
    assert in_config["quant_method"] == "modelopt"
    assert in_config["quant_algo"] == written["quant_algo"] == name.upper()
    assert in_config["ignore"] == written["exclude_modules"]
    assert any("mtp" in pattern for pattern in written["exclude_modules"])
    assert "lm_head" in written["exclude_modules"]


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_quantised_tensors_are_model_optimizers_own_to_the_bit(tmp_path, name):
    """Its exporter of Megatron models gives the same folder but for dtypes that it does not keep."""
    from modelopt.torch.export import export_mcore_gpt_to_hf

    path = tiny.write_nemotron_h(tmp_path / "source", dtype=torch.bfloat16, **SIZES["nemotron_h"])
    source = open_folder(path)
    model = quantize(build(source), name)
    export_folder(save(model, tmp_path), source, tmp_path / "export", quantize=name)
    (tmp_path / "anchor").mkdir()
    export_mcore_gpt_to_hf(model, str(path), dtype=torch.bfloat16, export_dir=str(tmp_path / "anchor"))
    ours, theirs = open_folder(tmp_path / "export"), open_folder(tmp_path / "anchor")
    assert ours.tensors.keys() == theirs.tensors.keys()
    differing = {n for n in ours.tensors if ours.sha256(n) != theirs.sha256(n)}
    assert {n.rsplit(".", 1)[1] for n in differing} <= {"A_log", "D", "e_score_correction_bias"}
    assert all(ours.tensors[n].dtype == source.tensors[n].dtype for n in differing)
    mine, anchor = (dict(f.config["quantization_config"]) for f in (ours, theirs))
    # Module by module instead of by prefix: the same set.
    excluded = anchor.pop("ignore")
    patterns = mine.pop("ignore")
    assert mine == anchor
    assert not not_excluded({"quant_method": "modelopt", "ignore": patterns}, excluded)
    packed = [n.removesuffix("_scale") for n in ours.tensors if n.endswith("weight_scale")]
    modules = [n.removesuffix(".weight") for n in packed]
    assert not_excluded({"quant_method": "modelopt", "ignore": patterns}, modules) == modules


@pytest.mark.usefixtures("megatron_rank")
def test_exported_weights_are_those_that_were_trained_with(source, tmp_path):
    """A weight read as a server reads it equals what the quantiser gave the layer in training, also where it
    has outgrown its scale."""
    # In BF16 the fake quantiser rounds twice, and some values come out one FP8 step beside the real ones.
    model = quantize(build(source, torch.float32))
    with torch.no_grad():
        model.get_parameter("decoder.layers.1.self_attention.linear_proj.weight").mul_(1.37)  # hits no tie
    export_folder(save(model, tmp_path), source, tmp_path / "export", quantize="fp8")
    export = open_folder(tmp_path / "export")
    layer = model.get_submodule("decoder.layers.1.self_attention.linear_proj")
    stem = {"mimo": "model.layers.1.self_attn.o_proj", "nemotron_h": "backbone.layers.1.mixer.o_proj"}
    name = stem[source.path.name]
    served = export.read_tensor(f"{name}.weight").float() * export.read_tensor(f"{name}.weight_scale")
    trained = layer.weight_quantizer(layer.weight).float()
    torch.testing.assert_close(served, trained, rtol=1e-6, atol=0)
    assert (served - layer.weight).abs().max() > 0.2 * layer.weight.abs().max(), "the largest do not fit"
    amax = layer.input_quantizer.amax.float()
    assert torch.equal(export.read_tensor(f"{name}.input_scale").reshape(()), amax.reshape(()) / 448)


def check_every_int8_row(source, folder, *, with_mtp):
    """Compare each exported INT8 number times the scale of its row with what the layer computes with.

    Some rows have outgrown their scales since they were calibrated, and one is all zeros.
    """
    model = build(source, torch.float32)
    spread_rows(model)
    with torch.no_grad():
        model.get_parameter("decoder.layers.1.self_attention.linear_proj.weight")[5] = 0
    quantize(model, "int8", with_mtp=with_mtp)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.37)
    export_folder(save(model, folder / "run"), source, folder / "export", mtp="live", quantize="int8")
    export, trained = open_folder(folder / "export"), folded(model, source, folder / "folded")
    packed = [name for name, entry in export.tensors.items() if entry.dtype == "I8"]
    assert any("mtp" in name for name in packed) == with_mtp
    for name in packed:
        scale = export.read_tensor(f"{name}_scale")
        assert scale.dtype == torch.float32
        assert scale.shape == (len(trained[name]), 1)
        served = export.read_tensor(name).float() * scale
        torch.testing.assert_close(served, trained[name], rtol=1e-6, atol=0)
        assert export.read_tensor(name).abs().max() >= 127


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize("with_mtp", [False, True])
def test_every_int8_row_is_the_one_that_was_trained_with(source, tmp_path, with_mtp):
    """In every weight of every kind: fused projections, parts of one, experts, MTP layers."""
    check_every_int8_row(source, tmp_path, with_mtp=with_mtp)
    assert inspect_folder(tmp_path / "export").ok


@pytest.mark.usefixtures("megatron_rank")
def test_sabotage_int8_scales_of_other_rows_are_found(source, tmp_path, monkeypatch):
    """The comparison sees scales that were not unpacked as their weights were."""
    real = quantized_export._Int8Export._layer

    def of_the_next_row(self, weight, amax, inputs):
        return real(self, weight, amax.roll(1, 0), inputs)

    monkeypatch.setattr(quantized_export._Int8Export, "_layer", of_the_next_row)
    with pytest.raises(AssertionError, match="not close"):
        check_every_int8_row(source, tmp_path, with_mtp=False)


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_int8_number_is_the_quantisers(source, tmp_path, dtype):
    """Also halfway between two, where dividing by a scale and multiplying by its inverse disagree."""
    model = quantize(build(source, dtype), "int8")
    name, layer = next((n, m) for n, m in model.named_modules() if n.endswith("linear_proj"))
    amax = layer.weight_quantizer.amax.float()
    with torch.no_grad():
        layer.weight.copy_((torch.arange(layer.weight.shape[1]) + 0.5) * amax / 127)
    export_folder(save(model, tmp_path), source, tmp_path / "export", quantize="int8")
    by_megatron = find_family(source.config).name_map(source.config).by_megatron
    exported = open_folder(tmp_path / "export").read_tensor(by_megatron[f"{name}.weight"].hf_names[0])
    numbers = layer.weight_quantizer(layer.weight.float()) * 127 / amax
    assert torch.equal(exported.float(), numbers.round())
    divided = (layer.weight.float() / (amax / 127)).round()
    assert dtype == torch.bfloat16 or not torch.equal(divided, numbers.round()), "they disagree nowhere"


@pytest.mark.usefixtures("megatron_rank")
def test_each_token_has_an_int8_scale_of_its_own(source):
    """What servers compute: the largest value of a token is 127, whatever the other tokens are."""
    layer = quantize(build(source, torch.float32), "int8").get_submodule(
        "decoder.layers.1.self_attention.linear_proj"
    )
    inputs = torch.randn(6, 2, layer.weight.shape[1], generator=torch.Generator().manual_seed(0))
    inputs[3, 1] *= 1000
    scale = inputs.abs().amax(-1, keepdim=True) / 127
    torch.testing.assert_close(layer.input_quantizer(inputs), (inputs / scale).round() * scale)
    assert not any("input_quantizer" in name for name in layer.state_dict() if name.endswith("_amax"))


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_sabotage_a_checkpoint_in_another_format_is_refused(source, tmp_path, name):
    checkpoint = save(quantize(build(source), name), tmp_path)
    wrong = {"fp8": "int8", "int8": "fp8"}[name]
    with pytest.raises(CheckpointError, match=r"the checkpoint (holds|lacks) .*_amax"):
        export_folder(checkpoint, source, tmp_path / "export", quantize=wrong)
    assert not (tmp_path / "export").exists()


@pytest.mark.usefixtures("megatron_rank")
def test_sabotage_scales_under_another_name_are_not_overlooked(tmp_path, monkeypatch):
    """Undivided, Mamba's scales have one name where its weight has five: it must not be exported plain."""
    source = open_folder(tiny.write_nemotron_h(tmp_path / "source", dtype=torch.bfloat16))
    monkeypatch.setattr(quantization, "_divide_scales", lambda chunk: None)
    checkpoint = save(quantize(build(source), "int8"), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"holds \S*in_proj.weight_quantizer._amax, and int8 has no such"
    ):
        export_folder(checkpoint, source, tmp_path / "export", quantize="int8")
    assert not (tmp_path / "export").exists()


@pytest.mark.usefixtures("megatron_rank")
def test_sabotage_one_scale_for_a_whole_weight_is_not_int8(tmp_path, monkeypatch):
    source = open_folder(tiny.write_nemotron_h(tmp_path / "source", pattern="*-", dtype=torch.bfloat16))
    real = quantization.quantizer_config

    def per_tensor(name):
        config = real(name)
        quantization.quantizer_attributes(config, "weight_quantizer")["axis"] = None
        return config

    monkeypatch.setattr(quantization, "quantizer_config", per_tensor)
    checkpoint = save(quantize(build(source), "int8"), tmp_path)
    with pytest.raises(CheckpointError, match=r"_amax holds 1 scales, and int8 needs \d+: one for each row"):
        export_folder(checkpoint, source, tmp_path / "export", quantize="int8")
    assert not (tmp_path / "export").exists()


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_checkpoint_brings_back_every_scale(source, tmp_path, name):
    """Another calibration, and weights that moved since: the scales are the checkpoint's, to the bit."""
    model = quantize(build(source), name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    checkpoint = save(model, tmp_path)
    other = build(source)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    quantize(other, name, seed=1)
    assert any(not same_bytes(scales(model)[name], tensor) for name, tensor in scales(other).items())
    checkpointing.load_checkpoint(checkpoint, [other])
    assert scales(model)
    assert all(same_bytes(scales(model)[name], tensor) for name, tensor in scales(other).items())
    assert same_bytes(forward(model.eval()), forward(other.eval()))


@pytest.mark.usefixtures("megatron_rank")
def test_sabotage_a_checkpoint_that_lost_its_scales_is_refused(source, tmp_path, monkeypatch):
    model = quantize(build(source))
    real = checkpointing._sharded_state

    def without_scales(*args, **options):
        state = real(*args, **options)
        state["model0"] = {k: v for k, v in state["model0"].items() if not k.endswith("_amax")}
        return state

    monkeypatch.setattr(checkpointing, "_sharded_state", without_scales)
    checkpoint = save(model, tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"has no .*_amax"):
        checkpointing.load_checkpoint(checkpoint, [quantize(build(source))])
    with pytest.raises(CheckpointError, match="no quantiser's state"):
        export_folder(checkpoint, source, tmp_path / "export", quantize="fp8")
    assert not (tmp_path / "export").exists()


@pytest.mark.usefixtures("megatron_rank")
def test_one_topology_throughout(source, tmp_path):
    """A checkpoint of a quantised model is not taken for an ordinary one, nor the reverse."""
    quantised = save(quantize(build(source)), tmp_path / "quantised")
    plain = save(build(source), tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"_amax.*\n.*as the run that wrote it did"):
        checkpointing.load_checkpoint(quantised, [build(source)])
    with pytest.raises(CheckpointError, match=r"has no .*_amax"):
        checkpointing.load_checkpoint(plain, [quantize(build(source))])
    with pytest.raises(CheckpointError, match="is of a quantised model"):
        export_folder(quantised, source, tmp_path / "export")


@pytest.mark.usefixtures("megatron_rank")
def test_heads_dropped_when_it_was_quantised_are_missed_by_name(source, tmp_path):
    """Quantised without MTP layers, continued with them: the first key is named, and what to do."""
    checkpoint = save(quantize(build(source, mtp=False)), tmp_path)
    with pytest.raises(CheckpointError, match=r"has no mtp\.layers\.0\.\S+.*\n.*with or without MTP layers"):
        checkpointing.load_checkpoint(checkpoint, [quantize(build(source))])
    # The source's heads are not lost: they are exported from its folder.
    export_folder(checkpoint, source, tmp_path / "export", quantize="fp8")
    assert verify_folders(source.path, tmp_path / "export").ok


@pytest.mark.usefixtures("megatron_rank")
def test_heads_left_out_are_put_to_sleep_and_quantised_ones_are_not(source):
    assert should_freeze_mtp(build(source)), "nothing is quantised"
    left_out = quantize(build(source))
    assert should_freeze_mtp(left_out)
    assert not any("mtp" in name.split(".") for name in quantizers(left_out))
    included = quantize(build(source), with_mtp=True)
    assert not should_freeze_mtp(included)
    assert not should_freeze_mtp([included])
    assert any("mtp" in name.split(".") for name in quantizers(included))


@pytest.mark.usefixtures("megatron_rank")
def test_quantisers_in_heads_that_sleep_do_not_move(source, tmp_path):
    """They are buffers of MTP layers like others: proven unchanged, and the proof can fail."""
    model = quantize(build(source), with_mtp=True)
    handle = freeze_mtp(model)
    names = [name for name in handle.fingerprint() if name.endswith("_amax")]
    assert names
    forward(model.train()).float().mean().backward()
    handle.check()
    export_folder(save(model, tmp_path), source, tmp_path / "export", quantize="fp8")
    assert verify_folders(source.path, tmp_path / "export").ok, "the export keeps the source's bytes"
    model.get_buffer(names[0]).mul_(2)
    with pytest.raises(MTPChangedError, match="_amax"):
        handle.check()


@pytest.mark.usefixtures("megatron_rank")
def test_quantised_heads_that_were_trained_are_exported_quantised(source, tmp_path):
    model = quantize(build(source), with_mtp=True)
    export_folder(save(model, tmp_path), source, tmp_path / "export", mtp="live", quantize="fp8")
    export = open_folder(tmp_path / "export")
    assert any("mtp" in name and entry.dtype == "F8_E4M3" for name, entry in export.tensors.items())
    assert inspect_folder(tmp_path / "export").ok


@pytest.mark.usefixtures("megatron_rank")
def test_what_cannot_be_done_here_is_refused_by_name():
    quantization.check_format("fp8", Layout())
    with pytest.raises(ConfigError, match="`expert_parallel` 2"):
        quantization.check_format("fp8", Layout(tensor=2, expert=2, sequence_parallel=True))
    with pytest.raises(ConfigError, match=r"nvfp4.*CUDA"):
        quantization.check_format("nvfp4", Layout())


@pytest.mark.usefixtures("megatron_rank")
def test_rows_that_are_no_whole_blocks_are_refused_before_training(tmp_path):
    source = open_folder(tiny.write_nemotron_h(tmp_path / "source", moe_intermediate_size=24))
    with pytest.raises(ConfigError, match=r"blocks are 16 values.*linear_fc2.weight has 24"):
        quantize(build(source), "nvfp4")


@pytest.mark.usefixtures("megatron_rank")
def test_every_expert_has_scales_of_its_own(tmp_path):
    """Experts of very different size: each exported one is near what it was."""
    source = open_folder(tiny.write_nemotron_h(tmp_path / "source", pattern="E", mtp_pattern="*"))
    model = build(source, torch.float32)
    with torch.no_grad():
        for index, expert in enumerate(model.get_submodule("decoder.layers.0.mlp.experts.local_experts")):
            expert.linear_fc1.weight.fill_(10.0**index)
    quantize(model)
    export_folder(save(model, tmp_path), source, tmp_path / "export", quantize="fp8")
    export = open_folder(tmp_path / "export")
    for index in range(4):
        name = f"backbone.layers.0.mixer.experts.{index}.up_proj.weight"
        served = export.read_tensor(name).float() * export.read_tensor(f"{name}_scale")
        torch.testing.assert_close(served, torch.full_like(served, 10.0**index))


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize("name", ["fp8", "int8", "nvfp4"])
def test_the_output_layer_of_a_tied_model_is_excluded_by_name(tmp_path, name):
    """Its weight is the embedding's, and readers would look for scales of a layer that they see."""
    tiny.write_mimo(tmp_path / "source", tie_word_embeddings=True, dtype=torch.bfloat16, **SIZES["mimo"])
    source = open_folder(tmp_path / "source")
    assert "lm_head.weight" not in source.tensors
    model = quantize(build(source), name)
    freeze_mtp(model)
    export_folder(save(model, tmp_path), source, tmp_path / "export", quantize=name)
    assert verify_folders(source.path, tmp_path / "export").ok
    assert "lm_head" in open_folder(tmp_path / "export").config["quantization_config"]["ignore"]
