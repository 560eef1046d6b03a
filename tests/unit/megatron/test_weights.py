"""Weights into Megatron and out of it again: every bit, every tensor, and refusals instead of silence."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from torpor.checkpoints.folder import open_folder
from torpor.errors import CheckpointError, MTPChangedError
from torpor.megatron.checkpointing import save_checkpoint
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import export_folder, load_weights, write_folder

SOURCES = [
    (tiny.write_mimo, {}),
    (tiny.write_mimo, {"num_mtp": 2, "tie_word_embeddings": True}),
    (tiny.write_mimo, {"dtype": torch.bfloat16}),
    (tiny.write_nemotron_h, {}),
    (tiny.write_nemotron_h, {"num_mtp": 2, "mtp_pattern": "M*E"}),
    (tiny.write_nemotron_h, {"dtype": torch.bfloat16, "num_mtp": 2}),
]
every_source = pytest.mark.parametrize(
    ("write", "fields"),
    SOURCES,
    ids=[f"{write.__name__.removeprefix('write_')}-{fields}" for write, fields in SOURCES],
)


def load_source(write, path, mtp=True, dtype=torch.float32, **fields):
    folder = open_folder(write(path / "source", dtype=dtype, **fields))
    chunks = build_model(folder.config, Layout(), dtype, mtp=mtp)
    load_weights(chunks, folder)
    return folder, chunks


def payloads(folder):
    return {n: (e.dtype, e.shape, bytes(folder.read_bytes(n))) for n, e in folder.tensors.items()}


def rewrite(path, change):
    """Apply `change(tensors)` to the tensors of a single-file folder."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@every_source
def test_round_trip_through_a_distributed_checkpoint_is_bit_identical(tmp_path, megatron_rank, write, fields):
    """Hugging Face -> Megatron -> torch_dist -> Hugging Face: same names, dtypes, shapes and bytes."""
    source, chunks = load_source(write, tmp_path, **fields)
    checkpoint = save_checkpoint(tmp_path / "run", 1, chunks)
    for mtp in ("source", "live"):
        export_folder(checkpoint, source, tmp_path / f"export-{mtp}", mtp=mtp)
        export = open_folder(tmp_path / f"export-{mtp}")
        assert payloads(export) == payloads(source)
        assert export.config_bytes == source.config_bytes
        assert [file.name for file in export.companions] == [file.name for file in source.companions]


@pytest.mark.parametrize("write", [tiny.write_mimo, tiny.write_nemotron_h])
def test_a_model_in_one_process_is_written_as_it_is(tmp_path, megatron_rank, write):
    source, chunks = load_source(write, tmp_path, num_mtp=2)
    write_folder(chunks, source.config, tmp_path / "written", companions=source.companions)
    written = open_folder(tmp_path / "written")
    assert payloads(written) == payloads(source)
    assert dict(written.config) == dict(source.config)


def test_loading_casts_to_the_parameters_dtype(tmp_path, megatron_rank):
    """A BF16 folder trains in FP32 without a change of value, and its export is BF16 again, bit for bit."""
    source, chunks = load_source(tiny.write_nemotron_h, tmp_path, dtype=torch.bfloat16, num_mtp=1)
    wide = build_model(source.config, Layout(), torch.float32)
    load_weights(wide, source)
    narrow = dict(chunks[0].named_parameters())
    assert all(torch.equal(p, narrow[n].float()) for n, p in wide[0].named_parameters())
    export_folder(save_checkpoint(tmp_path / "run", 1, wide), source, tmp_path / "export")
    assert payloads(open_folder(tmp_path / "export")) == payloads(source)


def test_a_narrower_run_still_exports_the_sources_mtp(tmp_path, megatron_rank):
    """FP32 source, BF16 run: live MTP equals the source cast to BF16, the export has the source's bytes."""
    source = open_folder(tiny.write_mimo(tmp_path / "source"))
    narrow = build_model(source.config, Layout(), torch.bfloat16)
    load_weights(narrow, source)
    export_folder(save_checkpoint(tmp_path / "run", 1, narrow), source, tmp_path / "export")
    before, after = payloads(source), payloads(open_folder(tmp_path / "export"))
    mtp = [name for name in before if "mtp" in name]
    assert mtp
    assert all(before[name] == after[name] for name in mtp)
    assert any(before[name] != after[name] for name in before)
    assert all(before[name][:2] == after[name][:2] for name in before)


def test_a_run_without_mtp_exports_the_sources_mtp(tmp_path, megatron_rank):
    source, chunks = load_source(tiny.write_nemotron_h, tmp_path, mtp=False)
    checkpoint = save_checkpoint(tmp_path / "run", 1, chunks)
    export_folder(checkpoint, source, tmp_path / "export")
    assert payloads(open_folder(tmp_path / "export")) == payloads(source)
    with pytest.raises(CheckpointError, match="no MTP tensor"):
        export_folder(checkpoint, source, tmp_path / "live", mtp="live")
    assert not (tmp_path / "live").exists()


def test_trained_trunk_is_exported_and_follows_the_checkpoint(tmp_path, megatron_rank):
    source, chunks = load_source(tiny.write_mimo, tmp_path)
    with torch.no_grad():
        for name, parameter in chunks[0].named_parameters():
            if not name.startswith("mtp."):
                parameter.mul_(2)
    export_folder(save_checkpoint(tmp_path / "run", 1, chunks), source, tmp_path / "export")
    export = open_folder(tmp_path / "export")
    for name in source.tensors:
        factor = 1 if "mtp" in name else 2
        assert torch.equal(export.read_tensor(name), factor * source.read_tensor(name)), name


@pytest.mark.parametrize("write", [tiny.write_mimo, tiny.write_nemotron_h])
def test_one_changed_mtp_bit_stops_the_export(tmp_path, megatron_rank, write):
    """Every MTP tensor in turn, parameters and buffers: flip one bit, and nothing is exported."""
    source, chunks = load_source(write, tmp_path)
    tensors = {n: t for n, t in chunks[0].state_dict().items() if n.startswith("mtp.") and t is not None}
    assert any("expert_bias" in name for name in tensors) == (write is tiny.write_nemotron_h)
    for step, (name, tensor) in enumerate(tensors.items(), 1):
        bits = tensor.view(-1).view(torch.int32)
        bits[0] ^= 1
        checkpoint = save_checkpoint(tmp_path / "run", step, chunks, keep=1)
        with pytest.raises(MTPChangedError, match="sha256"):
            export_folder(checkpoint, source, tmp_path / "export")
        assert not (tmp_path / "export").exists(), name
        bits[0] ^= 1


def test_folder_with_a_tensor_nobody_claims_is_refused(tmp_path, megatron_rank):
    path = tiny.write_nemotron_h(tmp_path / "source", shards=1)
    config = json.loads((path / "config.json").read_text())
    chunks = build_model(config, Layout(), torch.float32)
    rewrite(path, lambda tensors: tensors.update({"mtp.layers.9.norm.weight": torch.ones(32)}))
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.9\.norm\.weight"):
        load_weights(chunks, open_folder(path))


def test_folder_that_lacks_a_tensor_is_refused(tmp_path, megatron_rank):
    path = tiny.write_mimo(tmp_path / "source", shards=1)
    config = json.loads((path / "config.json").read_text())
    chunks = build_model(config, Layout(), torch.float32)
    rewrite(path, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.bias"):
        load_weights(chunks, open_folder(path))


def test_model_of_another_config_is_refused(tmp_path, megatron_rank):
    """More layers, fewer layers, another width, or heads the model was not built with."""
    folder = open_folder(tiny.write_mimo(tmp_path / "source"))
    larger = build_model(folder.config | {"num_hidden_layers": 3}, Layout(), torch.float32)
    with pytest.raises(CheckpointError, match=r"no tensor for decoder\.layers\.2"):
        load_weights(larger, folder)
    smaller = build_model(folder.config | {"num_hidden_layers": 1}, Layout(), torch.float32)
    with pytest.raises(CheckpointError, match=r"holds decoder\.layers\.1.*would be lost"):
        load_weights(smaller, folder)
    fewer = build_model(folder.config | {"num_nextn_predict_layers": 2}, Layout(), torch.float32)
    with pytest.raises(CheckpointError, match=r"no tensor for mtp\.layers\.1"):
        load_weights(fewer, folder)
    wider = build_model(folder.config | {"intermediate_size": 64}, Layout(), torch.float32)
    with pytest.raises(CheckpointError, match=r"linear_fc1\.weight has shape \(96, 32\)"):
        load_weights(wider, folder)


def test_parameter_outside_the_sharded_state_dict_is_refused(tmp_path, megatron_rank):
    """A tensor that Megatron would not checkpoint cannot be filled, and that is said."""
    folder = open_folder(tiny.write_mimo(tmp_path / "source"))
    chunks = build_model(folder.config, Layout(), torch.float32)
    complete = chunks[0].sharded_state_dict

    def without_norm(*args, **kwargs):
        state = complete(*args, **kwargs)
        del state["decoder.final_layernorm.weight"]
        return state

    chunks[0].sharded_state_dict = without_norm
    with pytest.raises(CheckpointError, match=r"decoder\.final_layernorm\.weight"):
        load_weights(chunks, folder)


def test_incomplete_checkpoints_are_refused(tmp_path, megatron_rank):
    source, chunks = load_source(tiny.write_mimo, tmp_path)
    checkpoint = save_checkpoint(tmp_path / "run", 1, chunks)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        export_folder(tmp_path / "run", source, tmp_path / "export")
    larger = open_folder(tiny.write_mimo(tmp_path / "larger", layers=3))
    with pytest.raises(CheckpointError, match=r"lacks decoder\.layers\.2"):
        export_folder(checkpoint, larger, tmp_path / "export")
    shutil.rmtree(tmp_path / "larger")
    wider = open_folder(tiny.write_mimo(tmp_path / "larger", intermediate_size=64))
    with pytest.raises(CheckpointError, match="shape"):
        export_folder(checkpoint, wider, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_existing_output_is_refused(tmp_path, megatron_rank):
    source, chunks = load_source(tiny.write_mimo, tmp_path)
    checkpoint = save_checkpoint(tmp_path / "run", 1, chunks)
    (tmp_path / "export").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        export_folder(checkpoint, source, tmp_path / "export")
