"""What the ranks of a distillation owe each other: one error for all, in time."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

import tiny
from ranks.launch import run_ranks
from torpor.errors import ConfigError, MTPChangedError, TorporError


def write_run(folder: Path, **settings):
    tiny.write_mimo(folder / "teacher", seed=1)
    tiny.write_mimo(folder / "student", seed=2)
    (folder / "text.txt").write_text("The dormouse sleeps through the winter. " * 100)
    values = {
        "teacher": "teacher",
        "student": "student",
        "output": "run",
        "data": "text.txt",
        "sequence_length": 16,
        "global_batch_size": 2,
        "steps": 2,
        "dtype": "fp32",
        "eval_batches": 0,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values | settings))
    return folder / "run.yaml"


def distil(path, *, damage=False):
    """Run on this rank; what was raised, as (kind, message, whether all ranks raise it), or the result."""
    from torpor.runs.distill import distill
    from torpor.training import loop
    from torpor.training.config import DistillConfig
    from torpor.training.config_file import read_config

    real = loop.run_step

    def run_step(job, step):
        record = real(job, step)
        for name, parameter in job.chunks[0].module.named_parameters():
            if damage and name.startswith("mtp."):
                with torch.no_grad():
                    parameter.view(-1)[0] += 1
        return record

    loop.run_step = run_step
    try:
        return distill(read_config(DistillConfig, path))
    except TorporError as error:
        return type(error), str(error), error.is_on_every_rank


def test_pipeline_stages_agree_on_the_result(tmp_path):
    results = run_ranks(distil, 2, write_run(tmp_path, pipeline_parallel=2))
    assert results[0] == results[1]
    assert results[0].steps == 2
    assert results[0].mtp_executions == 0


def damaged(path):
    return distil(path, damage=True)


def test_heads_that_changed_on_one_stage_are_an_error_on_every_rank(tmp_path):
    # With two stages only the last one holds MTP layers.
    results = run_ranks(damaged, 2, write_run(tmp_path, pipeline_parallel=2))
    assert results[0] == results[1]
    kind, message, is_on_every_rank = results[0]
    assert kind is MTPChangedError
    assert "changed while asleep" in message
    assert is_on_every_rank
    assert not (tmp_path / "run" / "export").exists()


def test_a_failure_of_rank_0_alone_is_an_error_on_every_rank_and_leaves_nothing(tmp_path):
    path = write_run(tmp_path)
    (tmp_path / "text.txt").write_text("too short")
    results = run_ranks(distil, 2, path)
    assert results[0] == results[1]
    kind, message, is_on_every_rank = results[0]
    assert kind is ConfigError
    assert "windows of sequence_length 16" in message
    assert is_on_every_rank
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("first", [{}, {"distributed_optimizer": True}], ids=["plain", "distributed"])
def test_two_ranks_continue_bit_for_bit(tmp_path, first):
    from torpor.checkpoints.folder import open_folder

    whole = write_run(tmp_path, steps=6, save_every=3, **first)
    broken = tmp_path / "broken.yaml"
    broken.write_text(whole.read_text().replace("output: run", "output: broken"))
    run_ranks(distil, 2, whole)
    # What a kill after the first checkpoint leaves.
    shutil.copytree(tmp_path / "run", tmp_path / "broken", ignore=shutil.ignore_patterns("export", "*.json"))
    shutil.copy(tmp_path / "run" / "run.json", tmp_path / "broken")
    checkpoints = tmp_path / "broken" / "checkpoints"
    shutil.rmtree(checkpoints / "step_00000006")
    for name in ("torpor.json", "metadata.json"):
        shutil.copy(
            tmp_path / "run" / "checkpoints" / "step_00000003" / name, checkpoints / "step_00000003" / name
        )
    (checkpoints / "latest").write_text("step_00000003\n")
    results = run_ranks(distil, 2, broken)
    assert results[0].resumed_from == 3
    digests = [
        {name: folder.sha256(name) for name in folder.tensors}
        for folder in (open_folder(tmp_path / name / "export") for name in ("run", "broken"))
    ]
    assert digests[0] == digests[1]


def cached(path, layouts):
    """Distil with a teacher's cache at one layout after the other; the losses, and whether a teacher ran."""
    import json

    from torpor.runs import distill as runs
    from torpor.training.config import DistillConfig
    from torpor.training.config_file import read_config

    real, built = runs._build_teacher, []
    results = []
    for index, layout in enumerate(layouts):
        built.clear()
        runs._build_teacher = lambda *arguments: (built.append(True), real(*arguments))[1]
        overrides = {"output": path.parent / f"out{index}", **layout}
        result = runs.distill(read_config(DistillConfig, path, overrides))
        runs._build_teacher = real
        lines = (result.output / "metrics.jsonl").read_text().splitlines()
        results.append((bool(built), [json.loads(line).get("loss") for line in lines]))
    return results


def test_a_cache_made_at_one_layout_serves_every_other(tmp_path):
    path = write_run(tmp_path, top_k=8, steps=3, eval_batches=1)
    layouts = [
        {},
        {"teacher_cache": tmp_path / "data"},
        {"teacher_cache": tmp_path / "tensor", "tensor_parallel": 2, "sequence_parallel": True},
        {"teacher_cache": tmp_path / "tensor", "pipeline_parallel": 2},
        {"teacher_cache": tmp_path / "context", "context_parallel": 2},
        {"teacher_cache": tmp_path / "context"},
    ]
    results = run_ranks(cached, 2, path, layouts, timeout=400)
    for result in results:
        assert [was_built for was_built, _ in result] == [True, True, True, False, True, False]
        for _, losses in result[1:]:
            assert [loss for loss in losses if loss] == pytest.approx(
                [loss for loss in result[0][1] if loss], rel=1e-4
            )
