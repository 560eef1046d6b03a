"""`torpor distill` as its users start it: whole runs, kills, several ranks, refusals."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

import tiny
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.verify import verify_folders

WRITERS = {"nemotron_h": tiny.write_nemotron_h, "mimo": tiny.write_mimo}
TEXT = "".join(
    f"In the burrow, night {n} of the long sleep: {n * n} breaths, {n % 7} dreams.\n" for n in range(400)
)
SETTINGS = {
    "sequence_length": 32,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "steps": 6,
    "lr": 5e-3,
    "warmup_steps": 2,
    "dtype": "fp32",
    "save_every": 3,
    "eval_every": 3,
    "eval_batches": 1,
}


def write_inputs(folder, family="nemotron_h", **settings):
    """Write a teacher, a student, text and run.yaml; return the path of the last."""
    WRITERS[family](folder / "teacher", seed=1)
    WRITERS[family](folder / "student", seed=2)
    (folder / "text.txt").write_text(TEXT)
    return write_config(folder, **settings)


def write_config(folder, name="run.yaml", **settings):
    values = {"teacher": "teacher", "student": "student", "output": "run", "data": "text.txt"}
    (folder / name).write_text(yaml.safe_dump(values | SETTINGS | settings))
    return folder / name


def command(*arguments, ranks=1):
    start = ["-m"] if ranks == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
    if ranks > 1:
        start.insert(-1, "--standalone")
    return [sys.executable, *start, "torpor", "distill", *map(str, arguments)]


def start(*arguments, ranks=1):
    return subprocess.Popen(
        command(*arguments, ranks=ranks),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )


def run(*arguments, ranks=1, expect=0):
    process = start(*arguments, ranks=ranks)
    out, err = process.communicate(timeout=240)
    assert process.returncode == expect, f"exit {process.returncode}\n{out}\n{err}"
    return out, err


def tensors(folder):
    opened = open_folder(folder)
    return {name: opened.sha256(name) for name in opened.tensors}


def steps_made(output):
    metrics = output / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return sum('"kind": "step"' in line for line in lines)


def wait_for_steps(process, output, count):
    deadline = time.monotonic() + 120
    while steps_made(output) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_ends_with_a_verified_export_a_proof_and_a_clean_screen(tmp_path):
    out, err = run(write_inputs(tmp_path), "--json")
    output = tmp_path / "run"
    result = json.loads(out.splitlines()[-1])
    assert result["ok"] is True
    assert (result["steps"], result["mtp_executions"], result["frozen"]) == (6, 0, True)
    verified = verify_folders(tmp_path / "student", output / "export")
    assert verified.ok
    assert result["mtp_tensors"] == len(verified.mtp) > 0
    assert result["trunk_changed"] == verified.trunk_changed > 0

    proof = json.loads((output / "dormancy.json").read_text())
    for role in ("student", "teacher"):
        assert proof["ranks"][0][role]["executions"] == 0
        assert proof["ranks"][0][role]["optimizer_checked"] is True
        assert len(proof["ranks"][0][role]["fingerprint"]) == proof["ranks"][0][role]["num_tensors"] > 0

    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert all(record["grad_norm"] > 0 and record["tokens_per_s"] > 0 for record in steps)
    assert [record["step"] for record in records if record["kind"] == "evaluation"] == [0, 3, 6]
    assert list((output / "tensorboard").iterdir())
    # Nothing of another library's: every line of stderr is a step or an evaluation.
    assert [line for line in err.splitlines() if not line.startswith("step ")] == []


def test_heads_that_run_are_trained_and_the_export_says_so(tmp_path):
    out, _ = run(write_inputs(tmp_path, "mimo", dtype="bf16"), "--no-freeze-mtp", "--json")
    result = json.loads(out.splitlines()[-1])
    assert (result["frozen"], result["mtp_executions"]) == (False, None)
    verified = verify_folders(tmp_path / "student", tmp_path / "run" / "export")
    assert verified.mtp_names("differing")
    assert not verified.trunk_missing
    assert not (tmp_path / "run" / "dormancy.json").exists()
    last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-2]
    assert last["mtp_loss"] > 0


@pytest.mark.parametrize(("family", "dtype"), [("nemotron_h", "fp32"), ("mimo", "bf16")])
def test_a_killed_run_ends_with_the_bytes_of_an_uninterrupted_one(tmp_path, family, dtype):
    settings = {"steps": 40, "save_every": 5, "eval_every": 7, "dtype": dtype}
    whole = write_inputs(tmp_path, family, **settings, output="whole")
    broken = write_config(tmp_path, "broken.yaml", **settings, output="broken")
    run(whole)
    process = start(broken)
    wait_for_steps(process, tmp_path / "broken", 12)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert steps_made(tmp_path / "broken") < 40
    assert not (tmp_path / "broken" / "export").exists()
    out, err = run(broken, "--json")

    assert "continuing after step" in err
    assert json.loads(out.splitlines()[-1])["resumed_from"] >= 5
    assert tensors(tmp_path / "whole" / "export") == tensors(tmp_path / "broken" / "export")
    records = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "broken")
    ]
    losses = [
        [(r["kind"], r["step"], r.get("loss"), r.get("held_out_loss")) for r in part] for part in records
    ]
    assert losses[0] == losses[1]


def test_sigterm_saves_and_the_same_command_continues(tmp_path):
    config = write_inputs(tmp_path, steps=60, save_every=1000, eval_batches=0)
    process = start(config)
    wait_for_steps(process, tmp_path / "run", 5)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped after step" in out
    assert "same command again" in out
    out, err = run(config, "--json")
    assert "continuing after step" in err
    assert json.loads(out.splitlines()[-1])["steps"] == 60

    before = tensors(tmp_path / "run" / "export")
    out, _ = run(config, "--json")  # a finished run is left alone
    assert json.loads(out.splitlines()[-1])["ok"] is True
    assert tensors(tmp_path / "run" / "export") == before


def test_a_run_cannot_be_continued_with_other_settings(tmp_path):
    config = write_inputs(tmp_path, steps=60, save_every=2, eval_batches=0)
    process = start(config)
    wait_for_steps(process, tmp_path / "run", 4)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    _, err = run(write_config(tmp_path, steps=60, seed=5, eval_batches=0), expect=2)
    assert "written with other settings" in err
    assert "seed: 1234 there, 5 here" in err
    (tmp_path / "text.txt").write_text(TEXT.upper())
    _, err = run(write_config(tmp_path, steps=60, eval_batches=0), expect=2)
    assert "data: " in err
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A finished run of one rank; what two ranks do is compared with it."""
    folder = tmp_path_factory.mktemp("one")
    run(write_inputs(folder))
    return folder


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"distributed_optimizer": True, "expert_parallel": 2},
        {"tensor_parallel": 2, "sequence_parallel": True},
        {"pipeline_parallel": 2},
    ],
    ids=["data", "experts", "tensor", "pipeline"],
)
def test_two_ranks_reach_the_losses_of_one(one_rank, tmp_path, layout):
    two = write_config(one_rank, f"{'-'.join(layout) or 'data'}.yaml", output=str(tmp_path / "two"), **layout)
    out, _ = run(two, "--json", ranks=2)
    result = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert result["ok"] is True
    proof = json.loads((tmp_path / "two" / "dormancy.json").read_text())
    assert [report["rank"] for report in proof["ranks"]] == [0, 1]
    values = [
        [
            record.get("loss", record.get("held_out_loss"))
            for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        ]
        for folder in (one_rank / "run", tmp_path / "two")
    ]
    torch.testing.assert_close(values[0], values[1], rtol=2e-4, atol=1e-5)


def test_a_misspelt_key_is_answered_without_importing_torch(tmp_path):
    config = write_config(tmp_path, global_batch_sise=3)
    code = (
        "import sys, torpor.cli\n"
        "try: torpor.cli.app(['distill', sys.argv[1]])\n"
        "except SystemExit as left: sys.exit(0 if left.code == 2 and 'torch' not in sys.modules else 1)\n"
    )
    answered = subprocess.run(
        [sys.executable, "-c", code, str(config)], capture_output=True, text=True, check=False
    )
    assert answered.returncode == 0, answered.stderr
    assert "did you mean `global_batch_size`?" in answered.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


def test_a_refusal_on_two_ranks_is_told_once_and_leaves_nothing(tmp_path):
    config = write_inputs(tmp_path)
    (tmp_path / "text.txt").write_text("too short")
    before = sorted(tmp_path.rglob("*"))
    # A launcher reports any failure with 1; the ranks' own code is in its report.
    _, err = run(config, ranks=2, expect=1)
    assert err.count("ConfigError: `data` has ") == 1
    assert sorted(tmp_path.rglob("*")) == before
