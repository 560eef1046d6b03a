"""Distilling a quantised student on a CUDA device, where Model-Optimizer quantises blocks too."""

import pytest
import yaml

import tiny
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.inspect import inspect_folder
from torpor.checkpoints.verify import verify_folders
from torpor.runs.distill import distill
from torpor.training.config import DistillConfig
from torpor.training.config_file import read_config

STORED = {"fp8": "F8_E4M3", "int8": "I8", "nvfp4": "U8"}


def run(folder, output, **changes):
    values = {
        "teacher": "teacher",
        "student": "student",
        "output": output,
        "data": "text.txt",
        "sequence_length": 64,
        "global_batch_size": 2,
        "steps": 6,
        "lr": 5e-3,
        "dtype": "bf16",
        "save_every": 3,
        "eval_batches": 1,
    }
    (folder / f"{output}.yaml").write_text(yaml.safe_dump(values | changes))
    return distill(read_config(DistillConfig, folder / f"{output}.yaml"))


@pytest.mark.parametrize("quantize", STORED)
def test_a_quantised_student_learns_and_keeps_its_heads(no_process_groups, tmp_path, quantize):
    # Rows that blocks of 16 divide.
    for name, seed in (("teacher", 1), ("student", 2)):
        tiny.write_mimo(tmp_path / name, seed=seed, hidden=64)
    (tmp_path / "text.txt").write_text("The dormouse sleeps through the winter. " * 200)
    calibration = {} if quantize == "int8" else {"calib_size": 4}
    result = run(tmp_path, "run", quantize=quantize, **calibration)
    plain = run(tmp_path, "plain")
    assert result.frozen
    assert result.mtp_executions == 0
    assert result.last_loss < result.first_loss
    assert result.first_loss != plain.first_loss, "the quantisers do nothing"
    export = tmp_path / "run" / "export"
    assert verify_folders(tmp_path / "student", export).ok
    assert inspect_folder(export).ok
    tensors = open_folder(export).tensors
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == STORED[quantize]
