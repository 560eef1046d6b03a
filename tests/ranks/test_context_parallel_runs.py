"""Runs over context parallel ranks: the losses of one rank a sequence, exports that pass verification."""

import json
from pathlib import Path

import pytest
import yaml

import tiny
from chats import chat, give_chat, write_records
from ranks.launch import run_ranks
from torpor.checkpoints.verify import verify_folders

STEPS = 3


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


def run_all(distillations: list[Path], fine_tunings: list[Path]) -> list[tuple[int, int]]:
    """Make a run of each configuration on this rank; return steps and MTP executions."""
    from torpor.runs.distill import distill
    from torpor.runs.sft import sft
    from torpor.training.config import DistillConfig, SftConfig
    from torpor.training.config_file import read_config

    results = [distill(read_config(DistillConfig, path)) for path in distillations]
    results += [sft(read_config(SftConfig, path)) for path in fine_tunings]
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
def test_two_ranks_for_a_sequence_learn_what_one_does(tmp_path):
    """Distillation of a GPT model on windows of text, fine-tuning of a hybrid one on packed samples."""
    for seed, folder in enumerate(("teacher", "student")):
        tiny.write_mimo(tmp_path / folder, seed=seed)
    (tmp_path / "text.txt").write_text("The dormouse sleeps through the winter. " * 100)
    give_chat(tiny.write_nemotron_h(tmp_path / "model", seed=1))
    # Samples that take multiples of four places, so that context parallelism needs no padding.
    records = [chat("sing", "la" * 2 * (1 + n % 9)) for n in range(60)]
    write_records(tmp_path / "chat.jsonl", records)
    distil = {"data": "text.txt", "sequence_length": 16, "teacher": "teacher", "student": "student"}
    tune = {"data": "chat.jsonl", "sequence_length": 128, "model": "model"}
    distillations, fine_tunings = (
        [write_run(tmp_path, f"{name}-{size}", context_parallel=size, **settings) for size in (1, 2)]
        for name, settings in (("distil", distil), ("tune", tune))
    )
    found = run_ranks(run_all, 2, distillations, fine_tunings, timeout=500)
    assert found == [[(STEPS, 0)] * 4] * 2
    for source, name in (("student", "distil"), ("model", "tune")):
        assert_same_run(tmp_path / source, tmp_path / f"{name}-1", tmp_path / f"{name}-2")
