"""A distillation on a CUDA device: models wholly there, a run that resumes, heads asleep."""

import shutil

import pytest
import torch
import yaml

import tiny
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.verify import verify_folders
from torpor.megatron.graphed_projection import GraphedProjection
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.runs.distill import distill
from torpor.training.config import DistillConfig
from torpor.training.config_file import read_config

WRITERS = {"nemotron_h": tiny.write_nemotron_h, "mimo": tiny.write_mimo}


def test_every_parameter_and_buffer_is_built_on_the_device(megatron_rank, tmp_path):
    tiny.write_nemotron_h(tmp_path / "model", tokenizer=False)
    chunk = build_model(open_folder(tmp_path / "model").config, Layout(), torch.bfloat16)[0]
    tensors = [*chunk.named_parameters(), *chunk.named_buffers()]
    assert [name for name, tensor in tensors if tensor.device.type != "cuda"] == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["nemotron_h", "mimo"])
def test_a_run_learns_resumes_and_keeps_its_heads(no_process_groups, tmp_path, family, dtype):
    WRITERS[family](tmp_path / "teacher", seed=1)
    WRITERS[family](tmp_path / "student", seed=2)
    (tmp_path / "text.txt").write_text("The dormouse sleeps through the winter. " * 200)
    values = {
        "teacher": "teacher",
        "student": "student",
        "output": "run",
        "data": "text.txt",
        "sequence_length": 64,
        "global_batch_size": 2,
        "steps": 6,
        "lr": 5e-3,
        "dtype": dtype,
        "save_every": 3,
        "eval_batches": 1,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    config = read_config(DistillConfig, tmp_path / "run.yaml")
    whole = distill(config)
    assert whole.last_loss < whole.first_loss
    assert whole.mtp_executions == 0
    assert verify_folders(tmp_path / "student", whole.export).ok

    # What a kill after the first checkpoint leaves.
    checkpoints = config.output / "checkpoints"
    shutil.rmtree(checkpoints / "step_00000006")
    (checkpoints / "latest").write_text("step_00000003\n")
    shutil.rmtree(config.output / "export")
    (config.output / "summary.json").unlink()
    resumed = distill(config)
    assert resumed.resumed_from == 3
    # Atomic additions in some CUDA kernels keep this from being exact.
    assert resumed.last_loss == pytest.approx(whole.last_loss, rel=1e-2)


def test_a_teacher_from_a_graph_teaches_the_same(no_process_groups, monkeypatch, tmp_path):
    tiny.write_mimo(tmp_path / "teacher", seed=1)
    tiny.write_mimo(tmp_path / "student", seed=2)
    (tmp_path / "text.txt").write_text("The dormouse sleeps through the winter. " * 200)
    recorded = []
    record = GraphedProjection._record
    monkeypatch.setattr(
        GraphedProjection, "_record", lambda *args: (record(*args), recorded.append(args[0].is_recorded))
    )
    losses = []
    for name in ("graph", "eager"):
        values = {
            "teacher": "teacher",
            "student": "student",
            "output": name,
            "data": "text.txt",
            "sequence_length": 64,
            "global_batch_size": 2,
            "steps": 6,
            "lr": 5e-3,
            "dtype": "bf16",
            "eval_every": 3,
            "eval_batches": 2,
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
        if name == "eager":
            monkeypatch.setattr("torpor.training.distillation.can_be_recorded", lambda _: False)
        losses.append(distill(read_config(DistillConfig, tmp_path / f"{name}.yaml")))
    assert recorded == [True]
    # The losses of steps: a replay with inputs of the step before would be far off.
    assert losses[0].first_loss == losses[1].first_loss
    assert losses[0].last_loss == pytest.approx(losses[1].last_loss, rel=1e-3)
