"""Runs over context parallel ranks: the losses of one rank a sequence, exports that pass verification."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import tiny
from chats import chat, give_chat, write_records
from ranks.launch import run_ranks
from torpor.checkpoints.verify import verify_folders

STEPS = 3
MODELS = {"mimo": tiny.write_mimo, "hybrid": tiny.write_nemotron_h}


def write_run(folder: Path, name: str, **settings) -> Path:
    values = {
        "output": name,
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


def run_all(command: str, paths: list[Path]) -> list[tuple[int, int]]:
    """Make a run of each configuration on this rank; return steps and MTP executions."""
    from torpor.runs.distill import distill
    from torpor.runs.sft import sft
    from torpor.training.config import DistillConfig, SftConfig
    from torpor.training.config_file import read_config

    runs: dict[str, Callable] = {
        "distill": lambda path: distill(read_config(DistillConfig, path)),
        "sft": lambda path: sft(read_config(SftConfig, path)),
    }
    results = [runs[command](path) for path in paths]
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


def assert_same_run(source: Path, whole: Path, divided: Path) -> None:
    """Two ranks share each of four sequences, or take two of them each: FP32 sums in another order."""
    for what, values in read_metrics(whole).items():
        assert read_metrics(divided)[what] == pytest.approx(values, rel=1e-4)
    losses = read_metrics(whole)["loss"]
    assert losses[-1] < losses[0]
    result = verify_folders(source, divided / "export").to_json()
    assert result["ok"]
    assert result["mtp"]["identical"] == result["mtp"]["tensors"] > 0
    assert result["trunk"]["changed"] == result["trunk"]["tensors"]


@pytest.mark.timeout(600)
def test_a_distillation_has_the_losses_of_one_rank_a_sequence(tmp_path):
    (tmp_path / "text.txt").write_text("The dormouse sleeps through the winter. " * 100)
    paths = []
    for model, write in MODELS.items():
        folders = {"teacher": f"{model}-teacher", "student": f"{model}-student"}
        for seed, folder in enumerate(folders.values()):
            write(tmp_path / folder, seed=seed)
        settings = {"data": "text.txt", "sequence_length": 16, **folders}
        for size in (1, 2):
            paths.append(write_run(tmp_path, f"{model}-{size}", context_parallel=size, **settings))
    assert run_ranks(run_all, 2, "distill", paths, timeout=500) == [[(STEPS, 0)] * 4] * 2
    for model in MODELS:
        assert_same_run(tmp_path / f"{model}-student", tmp_path / f"{model}-1", tmp_path / f"{model}-2")


@pytest.mark.timeout(600)
def test_fine_tuning_on_packed_samples_has_the_losses_of_one_rank_a_row(tmp_path):
    """The samples take multiples of four places, so that context parallelism needs no padding."""
    records = [chat("sing", "la" * 2 * (1 + n % 9)) for n in range(60)]
    write_records(tmp_path / "chat.jsonl", records)
    paths = []
    for model, write in MODELS.items():
        give_chat(write(tmp_path / model, seed=1))
        settings = {"data": "chat.jsonl", "sequence_length": 128, "model": model}
        for size in (1, 2):
            paths.append(write_run(tmp_path, f"{model}-{size}", context_parallel=size, **settings))
    assert run_ranks(run_all, 2, "sft", paths, timeout=500) == [[(STEPS, 0)] * 4] * 2
    for model in MODELS:
        assert_same_run(tmp_path / model, tmp_path / f"{model}-1", tmp_path / f"{model}-2")
