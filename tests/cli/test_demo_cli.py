"""`torpor demo` from text to report, so small that nothing is learned; its checks by sabotage."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.verify import verify_folders
from torpor.reports.html import render_report
from torpor.reports.results import Stage

# The module's one demo starts four processes that import everything; a busy machine takes its time over that.
pytestmark = pytest.mark.timeout(900)

TINY = """
import sys
from pathlib import Path
import torpor.cli, torpor.runs.demo as demo
tiny = demo.DemoSize(
    characters=520_000, vocab_size=300, hidden_size=32, pattern="M*-E", kept=(0, 1, 3), sequence_length=32,
    batch=4, pretraining_steps=6, distillation_steps=4, evaluate_every=2, held_out_batches=1,
    measured_steps=2,
)
demo.DemoSize = lambda: tiny
torpor.cli.app(["demo", "--output", sys.argv[1], "--ranks", sys.argv[2]])
"""


def run_tiny(output, ranks):
    """Run the command with everything small, as a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", TINY, str(output), str(ranks)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A finished demo on two ranks: its folder and its process."""
    output = tmp_path_factory.mktemp("demo") / "out"
    return output, run_tiny(output, 2)


def test_demo_leaves_models_run_and_report(demo):
    output, finished = demo
    assert "Traceback" not in finished.stderr
    for path in ("teacher", "student", "distillation/export"):
        assert open_folder(output / path).tensors
    report = (output / "report.html").read_text(encoding="utf-8")
    assert "torchrun --nproc-per-node 2 -m torpor distill" in report
    assert (output / "distill.yaml").read_text(encoding="utf-8").splitlines()[0] in report
    assert str(output / "report.html") in finished.stdout


def test_heads_came_through_unchanged_and_the_trunk_did_not(demo):
    output, finished = demo
    verified = verify_folders(output / "student", output / "distillation" / "export")
    assert verified.ok
    assert verified.trunk_changed == verified.trunk_tensors
    tensors = len(verified.mtp)
    assert f"{tensors} of {tensors} MTP tensors have the name" in finished.stdout
    assert "MTP ran 0 times in training, over 2 ranks and both models" in finished.stdout


def test_head_that_learned_nothing_fails_the_demo(demo):
    _, finished = demo
    assert finished.returncode == 1
    assert "FAILED: the teacher's head works" in finished.stdout
    assert "A check FAILED" in finished.stdout


def test_progress_goes_to_stderr_and_numbers_every_stage(demo):
    _, finished = demo
    for number in range(1, 8):
        assert f"[{number}/7]" in finished.stderr
        assert f"[{number}/7]" not in finished.stdout
    assert "Warning" not in finished.stderr


def test_student_is_the_teacher_with_layers_left_out(demo):
    output, _ = demo
    teacher, student = open_folder(output / "teacher"), open_folder(output / "student")
    assert student.config["hybrid_override_pattern"] == "M*E"
    for name in student.tensors:
        if name.startswith("mtp."):
            assert student.sha256(name) == teacher.sha256(name)


def test_folder_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    finished = run_tiny(tmp_path, 1)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr.startswith("ConfigError: --output")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


# --- the report's checks, each broken in turn -----------------------------------------------------------


@pytest.fixture
def findings(demo, tmp_path):
    """What the finished demo found, on a copy of its folder; costs and drafts as a good run has them."""
    from torpor.runs.acceptance import DraftCounts
    from torpor.runs.costs import MeasuredCost
    from torpor.runs.demo_report import Findings
    from torpor.training.data import PackedWindows

    output = tmp_path / "out"
    shutil.copytree(demo[0], output)
    run = output / "distillation"
    # Four steps at a learning rate's warm-up need not improve anything; a real distillation does.
    (run / "metrics.jsonl").write_text(
        '{"kind": "evaluation", "step": 0, "held_out_loss": 2.0}\n'
        '{"kind": "step", "step": 1, "loss": 1.5, "step_ms": 100.0}\n'
        '{"kind": "evaluation", "step": 1, "held_out_loss": 1.0}\n'
    )
    tokens = np.zeros(200, dtype=np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    return Findings(
        teacher=open_folder(output / "teacher"),
        student=open_folder(output / "student"),
        pretraining=output / "pretraining",
        distillation=run,
        configuration=output / "distill.yaml",
        ranks=2,
        text="text",
        windows=PackedWindows(tmp_path / "tokens.npy", sequence_length=8, held_out=0.1, seed=1),
        teacher_drafts=DraftCounts(1, 50, 100, 10),
        before_drafts=DraftCounts(1, 5, 100, 10),
        after_drafts=DraftCounts(1, 20, 100, 10),
        verified=verify_folders(output / "student", run / "export"),
        costs=[MeasuredCost(name, (0.1,), 10, 10, 10) for name in ("asleep", "awake", "absent")],
        cost_note="",
        stages=(Stage("one", 1.0, "done"),),
        notes=(),
        seconds=1.0,
    )


def failures(found):
    """The verdict's lines that failed, after checking that page and flag agree with them."""
    from torpor.runs.demo_report import build_report

    report = build_report(found)
    failed = [line for line in report.verdict if line.startswith("FAILED")]
    assert report.passed == (not failed)
    assert ("Every check held" in render_report(report)) == report.passed
    return failed


def flip_a_byte(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ 1]))


def test_good_findings_pass(findings):
    assert failures(findings) == []


def test_changed_head_fails(findings):
    export = findings.distillation / "export"
    entry = next(e for n, e in open_folder(export).tensors.items() if n.startswith("mtp."))
    flip_a_byte(entry.file, entry.offset)
    verified = verify_folders(findings.student.path, export)
    failed = failures(dataclasses.replace(findings, verified=verified))
    total = len(verified.mtp)
    assert failed[0].startswith(f"FAILED: {total - 1} of {total} MTP tensors")


def test_untrained_trunk_fails(findings):
    verified = verify_folders(findings.student.path, findings.student.path)
    failed = failures(dataclasses.replace(findings, verified=verified))
    assert len(failed) == 1
    assert "0 of" in failed[0]
    assert "trunk tensors were trained" in failed[0]


@pytest.mark.parametrize("model", ["student", "teacher"])
def test_execution_on_any_rank_fails(findings, model):
    path = findings.distillation / "dormancy.json"
    dormancy = json.loads(path.read_text())
    dormancy["ranks"][1][model]["executions"] = 3
    path.write_text(json.dumps(dormancy))
    assert failures(findings) == ["FAILED: MTP ran 3 times in training, over 2 ranks and both models"]


def test_divergence_that_grew_fails(findings):
    path = findings.distillation / "metrics.jsonl"
    path.write_text(path.read_text().replace('"held_out_loss": 1.0', '"held_out_loss": 2.5'))
    assert failures(findings) == ["FAILED: held-out KL divergence from the teacher went from 2.000 to 2.500"]


def test_head_at_twice_chance_or_below_fails(findings):
    drafts = dataclasses.replace(findings.teacher_drafts, constant=25)
    failed = failures(dataclasses.replace(findings, teacher_drafts=drafts))
    assert failed == [
        "FAILED: the teacher's head works: 50.0% of its drafts are accepted, chance is 25.0%",
    ]


# --- when two ranks are impossible ----------------------------------------------------------------------


@pytest.fixture
def distiller(tmp_path):
    from torpor.runs.demo import DemoSize, _Demo

    return _Demo(tmp_path, 2, DemoSize(batch=8))


def test_one_rank_is_used_where_two_never_start(distiller, monkeypatch, capsys):
    launched = []

    def launch(config, ranks, metrics):
        import yaml

        launched.append((ranks, yaml.safe_load(config.read_text())["micro_batch_size"]))
        return 1 if ranks == 2 else 0

    monkeypatch.setattr("torpor.runs.demo.launch_distillation", launch)
    command = distiller._distill()
    assert launched == [(2, 4), (1, 8)]
    assert command == f"torpor distill {distiller.output / 'distill.yaml'}"
    assert distiller.ranks == 1
    assert "running on one" in capsys.readouterr().err
    assert len(distiller.notes) == 1


def test_failure_in_training_is_not_hidden_by_another_try(distiller, monkeypatch):
    from torpor.errors import TorporError

    def launch(config, ranks, metrics):
        metrics.parent.mkdir(parents=True)
        metrics.write_text('{"kind": "step"}\n')
        return 1

    monkeypatch.setattr("torpor.runs.demo.launch_distillation", launch)
    with pytest.raises(TorporError, match="exit code 1"):
        distiller._distill()


def test_distillation_that_never_trains_is_ended(tmp_path, monkeypatch):
    from torpor.runs import demo as module

    monkeypatch.setattr(module, "START_WITHIN_S", 0.5)
    monkeypatch.setattr(module, "distill_command", lambda config, ranks: ["sleep", "60"])
    code = module.launch_distillation(tmp_path / "distill.yaml", 1, tmp_path / "metrics.jsonl")
    assert code == module.NEVER_STARTED
