"""Runs over context parallel ranks: the losses of one rank a sequence, exports that pass verification."""

import json
from pathlib import Path

import pytest
import yaml

import tiny
from ranks.launch import run_ranks
from torpor.checkpoints.verify import verify_folders

STEPS = 3


def write_run(folder: Path, name: str, **settings) -> Path:
    values = {
        "output": name,
        "sequence_length": 16,
        "global_batch_size": 4,
        "steps": STEPS,
        "lr": 1e-3,
        "dtype": "fp32",
        "held_out": 0.2,
        "eval_batches": 1,
        "eval_every": STEPS,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values | settings))
    return path


def distil(*paths: Path) -> list[tuple[int, int]]:
    """Distil on this rank, once for each configuration; return steps and MTP executions."""
    from torpor.runs.distill import distill
    from torpor.training.config import DistillConfig
    from torpor.training.config_file import read_config

    results = [distill(read_config(DistillConfig, path)) for path in paths]
    return [(result.steps, result.mtp_executions) for result in results]


def read_metrics(run: Path) -> dict[str, list[float]]:
    """Return the losses and gradient norms of a run, which Adam's steps alone would not tell apart."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {
        what: [value for line in lines for name, value in line.items() if name.endswith(what)]
        for what in ("loss", "grad_norm")
    }
    assert [len(values) for values in found.values()] == [STEPS + 2, STEPS]
    return found


@pytest.mark.parametrize("write", [tiny.write_mimo, tiny.write_nemotron_h])
def test_a_distillation_has_the_losses_of_one_rank_a_sequence(tmp_path, write):
    """Two ranks share each of four sequences, or take two of them each: FP32 sums in another order."""
    write(tmp_path / "teacher", seed=1)
    write(tmp_path / "student", seed=2)
    (tmp_path / "text.txt").write_text("The dormouse sleeps through the winter. " * 100)
    inputs = {"teacher": "teacher", "student": "student", "data": "text.txt"}
    paths = [write_run(tmp_path, f"cp{size}", context_parallel=size, **inputs) for size in (1, 2)]
    assert run_ranks(distil, 2, *paths) == [[(STEPS, 0)] * 2] * 2
    whole, divided = (read_metrics(tmp_path / name) for name in ("cp1", "cp2"))
    for what, values in whole.items():
        assert divided[what] == pytest.approx(values, rel=1e-4)
    assert whole["loss"][-1] < whole["loss"][0]
    result = verify_folders(tmp_path / "student", tmp_path / "cp2" / "export").to_json()
    assert result["ok"]
    assert result["mtp"]["identical"] == result["mtp"]["tensors"] > 0
    assert result["trunk"]["changed"] == result["trunk"]["tensors"]
