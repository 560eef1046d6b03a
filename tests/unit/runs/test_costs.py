"""Measured memory: asleep saves and allocates what a model without heads does, awake more."""

import pytest

import tiny
from torpor.checkpoints.folder import open_folder
from torpor.runs.costs import ARRANGEMENTS, build_job, count_saved_bytes, measure_costs, weights_bytes
from torpor.training.config import OptimizationConfig
from torpor.training.data import load_tokenizer, prepare_windows
from torpor.training.loop import run_step
from torpor.training.sources import find_sources

pytestmark = pytest.mark.usefixtures("megatron_rank")


@pytest.fixture
def inputs(tmp_path):
    teacher = open_folder(tiny.write_nemotron_h(tmp_path / "teacher", pattern="M*-E"))
    student = open_folder(tiny.write_nemotron_h(tmp_path / "student", pattern="M*E", seed=1))
    settings = OptimizationConfig(
        sequence_length=16, global_batch_size=2, micro_batch_size=2, steps=10, dtype="fp32", held_out=0.1
    )
    (tmp_path / "text.txt").write_text("The dormouse sleeps through the winter. " * 60)
    windows = prepare_windows(
        find_sources([tmp_path / "text.txt"]),
        "text",
        load_tokenizer(student.path),
        vocab_size=student.config["vocab_size"],
        folder=tmp_path,
        settings=settings,
    )
    return student, teacher, settings, windows


def test_asleep_costs_the_memory_of_absent_and_awake_costs_more(inputs):
    rounds = []
    costs = measure_costs(*inputs, warmup=1, steps=2, on_round=rounds.append)
    asleep, awake, absent = costs
    assert [cost.arrangement for cost in costs] == list(ARRANGEMENTS)
    assert asleep.saved_bytes == absent.saved_bytes < awake.saved_bytes
    assert asleep.state_bytes == absent.state_bytes < awake.state_bytes
    assert asleep.weights_bytes == awake.weights_bytes > absent.weights_bytes
    assert all(len(cost.seconds) == 2 and min(cost.seconds) > 0 for cost in costs)
    assert rounds == [1, 2, 3]


def test_gradients_and_adam_fill_three_times_the_trained_weights(inputs):
    awake = measure_costs(*inputs, warmup=0, steps=1)[1]
    job = build_job("awake", *inputs)
    trained = sum(p.numel() * 4 for chunk in job.chunks for p in chunk.parameters() if p.requires_grad)
    assert awake.state_bytes == 3 * trained


def test_arrangements_compute_the_same_divergence(inputs):
    first = {name: run_step(build_job(name, *inputs), 0).metrics["loss"] for name in ARRANGEMENTS}
    assert first["asleep"] == first["absent"] == first["awake"]


def test_saved_memory_is_counted_the_same_every_time(inputs):
    job = build_job("asleep", *inputs)
    counts = []
    for _ in range(2):
        with count_saved_bytes(job) as count:
            run_step(job, 0)
        counts.append(count())
    assert counts[0] == counts[1] > 0


def test_weights_are_those_of_both_models(inputs):
    student, teacher, *_ = inputs
    on_disk = sum(entry.nbytes for folder in (student, teacher) for entry in folder.tensors.values())
    held = weights_bytes(build_job("asleep", *inputs))
    # Megatron's routers hold a few counters that no folder has.
    assert on_disk <= held < 1.01 * on_disk


def test_kept_weights_do_not_count_as_saved(inputs, monkeypatch):
    job = build_job("absent", *inputs)
    with count_saved_bytes(job) as count:
        run_step(job, 0)
    without_weights = count()
    monkeypatch.setattr("torpor.runs.costs.weights_of", lambda job: [])
    with count_saved_bytes(job) as count:
        run_step(job, 0)
    assert count() > without_weights
