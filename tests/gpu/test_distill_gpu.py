"""A distillation on a CUDA device: models wholly there, a run that resumes, heads asleep."""

import shutil

import pytest
import torch

import tiny
from distill_runs import WRITERS, read, write_models
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.inspect import inspect_folder
from torpor.checkpoints.verify import verify_folders
from torpor.megatron.graphed_projection import GraphedProjection
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.runs.distill import distill

STORED = {"fp8": "F8_E4M3", "int8": "I8", "nvfp4": "U8"}


def test_every_parameter_and_buffer_is_built_on_the_device(megatron_rank, tmp_path):
    tiny.write_nemotron_h(tmp_path / "model", tokenizer=False)
    chunk = build_model(open_folder(tmp_path / "model").config, Layout(), torch.bfloat16)[0]
    tensors = [*chunk.named_parameters(), *chunk.named_buffers()]
    assert [name for name, tensor in tensors if tensor.device.type != "cuda"] == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["nemotron_h", "mimo"])
def test_a_run_learns_resumes_and_keeps_its_heads(no_process_groups, tmp_path, family, dtype):
    write_models(tmp_path, WRITERS[family])
    config = read(tmp_path, dtype=dtype)
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
    write_models(tmp_path, tiny.write_mimo)
    recorded = []
    record = GraphedProjection._record
    monkeypatch.setattr(
        GraphedProjection, "_record", lambda *args: (record(*args), recorded.append(args[0].is_recorded))
    )
    changes = {"eval_every": 3, "eval_batches": 2}
    graph = distill(read(tmp_path, "graph", **changes))
    monkeypatch.setattr("torpor.training.distillation.can_be_recorded", lambda _: False)
    eager = distill(read(tmp_path, "eager", **changes))
    assert recorded == [True]
    # The losses of steps: a replay with inputs of the step before would be far off.
    assert graph.first_loss == eager.first_loss
    assert graph.last_loss == pytest.approx(eager.last_loss, rel=1e-3)


@pytest.mark.parametrize("quantize", STORED)
def test_a_quantised_student_learns_and_keeps_its_heads(no_process_groups, tmp_path, quantize):
    """In NVFP4 too, whose blocks Model-Optimizer quantises on CUDA devices only."""
    write_models(tmp_path, tiny.write_mimo, hidden=64)  # rows that blocks of 16 divide
    calibration = {} if quantize == "int8" else {"calib_size": 4}
    result = distill(read(tmp_path, quantize=quantize, **calibration))
    plain = distill(read(tmp_path, "plain"))
    assert result.frozen
    assert result.mtp_executions == 0
    assert result.last_loss < result.first_loss
    assert result.first_loss != plain.first_loss, "the quantisers do nothing"
    export = tmp_path / "run" / "export"
    assert verify_folders(tmp_path / "student", export).ok
    assert inspect_folder(export).ok
    tensors = open_folder(export).tensors
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == STORED[quantize]
