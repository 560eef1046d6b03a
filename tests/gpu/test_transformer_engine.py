"""Runs with Transformer Engine installed: models of its layers, and of local ones where a run needs those."""

import pytest
import torch
import yaml

import tiny
from builds import record_builds
from chats import chat, give_chat, write_records
from distill_runs import WRITERS, read, write_models
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.inspect import inspect_folder
from torpor.checkpoints.verify import verify_folders
from torpor.megatron import capabilities
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.runs.distill import distill
from torpor.runs.sft import sft
from torpor.training.config import SftConfig
from torpor.training.config_file import read_config

LORA = {"lora": {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}}


@pytest.fixture(autouse=True)
def transformer_engine():
    if not capabilities.has_transformer_engine():
        pytest.skip("needs Transformer Engine, which is not installed")


@pytest.fixture
def without_transformer_engine(monkeypatch):
    return lambda: monkeypatch.setattr(capabilities, "has_transformer_engine", lambda: False)


@pytest.fixture
def built(monkeypatch):
    """Which models a run builds, in order: "engine" or "local" by the layers in them."""
    return record_builds(monkeypatch, lambda _, chunks: "engine" if engine_layers(chunks) else "local")


def engine_layers(chunks):
    return {name for module in chunks[0].modules() if (name := type(module).__name__).startswith("TE")}


@pytest.mark.parametrize("family", WRITERS)
def test_models_are_built_of_its_layers(megatron_rank, tmp_path, family):
    WRITERS[family](tmp_path / "model", tokenizer=False)
    config = open_folder(tmp_path / "model").config
    assert "TERowParallelLinear" in engine_layers(build_model(config, Layout(), torch.bfloat16))
    assert not engine_layers(build_model(config, Layout(), torch.bfloat16, transformer_impl="local"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", WRITERS)
def test_a_distillation_is_that_of_local_layers(
    no_process_groups, without_transformer_engine, built, tmp_path, family, dtype
):
    """Its products of FP32 are TF32's, and Adam makes the most of every difference."""
    write_models(tmp_path, WRITERS[family])
    engine = distill(read(tmp_path, dtype=dtype))
    assert engine.mtp_executions == 0
    assert verify_folders(tmp_path / "student", engine.export).ok
    without_transformer_engine()
    local = distill(read(tmp_path, "local", dtype=dtype))
    assert built == ["engine", "engine", "local", "local"]
    assert engine.first_loss == pytest.approx(local.first_loss, rel=1e-3)
    assert engine.last_loss == pytest.approx(local.last_loss, rel=2e-2)


def test_latent_experts_distil(no_process_groups, tmp_path):
    write_models(tmp_path, tiny.write_nemotron_h, moe_latent_size=16)
    result = distill(read(tmp_path))
    assert result.last_loss < result.first_loss
    assert result.mtp_executions == 0
    assert verify_folders(tmp_path / "student", result.export).ok


def test_a_quantised_student_has_experts_one_by_one(no_process_groups, built, tmp_path):
    write_models(tmp_path, tiny.write_nemotron_h)
    result = distill(read(tmp_path, quantize="fp8", calib_size=4))
    assert built == ["local", "engine"]
    assert result.last_loss < result.first_loss
    assert verify_folders(tmp_path / "student", result.export).ok
    assert inspect_folder(result.export).ok
    tensors = open_folder(result.export).tensors
    experts = {t.dtype for n, t in tensors.items() if ".experts.0.up_proj.weight" in n and "mtp" not in n}
    assert experts == {"F8_E4M3", "F32"}, "weights and their scales"


@pytest.mark.parametrize("changes", [{}, {"packing": False}, LORA], ids=["packed", "rows", "lora"])
@pytest.mark.parametrize("family", WRITERS)
def test_a_fine_tuning_is_that_of_local_layers(
    no_process_groups, without_transformer_engine, built, tmp_path, family, changes
):
    give_chat(WRITERS[family](tmp_path / "model", seed=1))
    write_records(tmp_path / "chat.jsonl", [chat(f"{n} and {n}?", str(2 * n)) for n in range(40)])
    values = {
        "model": "model",
        "data": "chat.jsonl",
        "sequence_length": 160,
        "global_batch_size": 2,
        "steps": 6,
        "lr": 5e-3,
        "dtype": "bf16",
        "eval_batches": 0,
        **changes,
    }

    def run(output):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values | {"output": output}))
        return sft(read_config(SftConfig, tmp_path / "run.yaml"))

    engine = run("engine")
    assert engine.last_loss < engine.first_loss
    assert engine.mtp_executions == 0
    assert verify_folders(tmp_path / "model", engine.export).ok
    without_transformer_engine()
    local = run("local")
    assert built == ["local" if changes == LORA else "engine", "local"]
    assert engine.first_loss == pytest.approx(local.first_loss, rel=1e-3)
    assert engine.last_loss == pytest.approx(local.last_loss, rel=2e-2)
