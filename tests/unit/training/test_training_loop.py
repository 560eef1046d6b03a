"""The loop on one rank: pre-training with awake MTP layers, evaluation, saving, stopping."""

import dataclasses
import math
import os
import signal

import numpy as np
import pytest
import torch

import tiny
from torpor.checkpoints.folder import open_folder
from torpor.errors import TorporError
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import load_weights
from torpor.training.config import OptimizationConfig
from torpor.training.data import PackedWindows
from torpor.training.loop import (
    Intervals,
    LoopHooks,
    StopRequest,
    evaluate,
    language_model_objective,
    prepare_job,
    run_step,
    train,
)


@pytest.fixture
def packed(tmp_path):
    # A text that a model can learn: the numbers 3, 4, .. 12, again and again.
    np.save(tmp_path / "tokens.npy", (np.arange(2000) % 10 + 3).astype(np.uint16))
    return PackedWindows(tmp_path / "tokens.npy", sequence_length=16, held_out=0.1, seed=1)


@pytest.fixture
def job(megatron_rank, tmp_path, packed):
    return build_job(tmp_path / "model", packed)


def build_job(path, packed, *, steps=8, mtp=True, **values):
    if not path.exists():
        tiny.write_mimo(path, tokenizer=False)
    settings = OptimizationConfig(
        **{
            "sequence_length": 16,
            "micro_batch_size": 1,
            "global_batch_size": 2,
            "steps": steps,
            "lr": 1e-2,
            "dtype": "fp32",
        }
        | values
    )
    folder = open_folder(path)
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    chunks = build_model(folder.config, Layout(), dtype, recompute=settings.recompute, mtp=mtp)
    load_weights(chunks, folder)
    return prepare_job(chunks, settings, packed, language_model_objective(), steps=steps)


def run(job, *, steps=8, start_step=0, intervals=None, **hooks):
    with StopRequest() as stop:
        return train(
            job,
            steps=steps,
            start_step=start_step,
            intervals=intervals or Intervals(),
            hooks=LoopHooks(**hooks),
            stop=stop,
        )


def test_pre_training_learns_trunk_and_heads(job):
    records = []
    run(job, on_step=records.append)
    first, last = records[0], records[-1]
    assert [record.step for record in records] == list(range(1, 9))
    assert last.metrics["loss"] < first.metrics["loss"] - 0.5
    assert last.metrics["mtp_loss"] < first.metrics["mtp_loss"]
    assert 0 <= last.metrics["mtp_acceptance"] <= 1
    assert all(record.grad_norm > 0 and record.seconds > 0 and record.memory_bytes > 0 for record in records)
    assert last.tokens == 32


def test_the_first_losses_are_those_of_guessing_and_of_the_windows_themselves(job, packed):
    from megatron.core.utils import unwrap_model

    model = unwrap_model(job.chunks)[0]
    model.train()
    expected = []
    for batch in job.training_batches(0):
        with torch.no_grad():
            losses = model(
                input_ids=batch.tokens_BS,
                position_ids=batch.positions_BS,
                attention_mask=None,
                labels=batch.labels_BS,
            )
        expected.append(float(losses.mean()))
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.clean_metrics_in_tracker()
    record = run_step(job, 0)
    assert record.metrics["loss"] == pytest.approx(sum(expected) / 2, rel=1e-6)
    assert record.metrics["mtp_loss"] == pytest.approx(math.log(320), rel=0.1)


def test_a_model_without_heads_reports_none(megatron_rank, tmp_path, packed):
    record = run_step(build_job(tmp_path / "model", packed, mtp=False), 0)
    assert "mtp_loss" not in record.metrics


def test_micro_batches_add_up_to_the_same_step(megatron_rank, tmp_path, packed):
    losses = []
    for micro_batch_size in (1, 2):
        job = build_job(tmp_path / "model", packed, micro_batch_size=micro_batch_size)
        losses.append([run_step(job, step).metrics["loss"] for step in range(4)])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "values", [{"dtype": "bf16"}, {"recompute": "selective"}, {"distributed_optimizer": True}]
)
def test_precision_recompute_and_sharded_optimizer_train_too(megatron_rank, tmp_path, packed, values):
    job = build_job(tmp_path / "model", packed, **values)
    losses = [run_step(job, step).metrics["loss"] for step in range(8)]
    assert losses[-1] < losses[0] - 0.3


def test_evaluation_trains_nothing_and_repeats_itself(job):
    before = [p.detach().clone() for chunk in job.chunks for p in chunk.parameters()]
    first, second = evaluate(job, 2), evaluate(job, 2)
    assert first == second
    assert first["loss"] == pytest.approx(math.log(320), rel=0.1)
    assert all(chunk.training for chunk in job.chunks)
    after = [p for chunk in job.chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_evaluations_and_checkpoints_come_when_due_and_at_the_end(job):
    saved, evaluated = [], []
    outcome = run(
        job,
        intervals=Intervals(evaluate=3, evaluation_batches=1, save=5),
        save=saved.append,
        on_evaluation=lambda step, _: evaluated.append(step),
    )
    assert saved == [5, 8]
    assert evaluated == [0, 3, 6, 8]
    assert [step for step, _ in outcome.evaluations] == evaluated
    assert (outcome.step, outcome.signal_number) == (8, None)


def test_a_signal_finishes_the_step_saves_and_returns(job):
    saved = []

    def on_step(record):
        if record.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    previous = signal.getsignal(signal.SIGTERM)
    outcome = run(job, on_step=on_step, save=saved.append)
    assert (outcome.step, outcome.signal_number, saved) == (2, signal.SIGTERM, [2])
    assert signal.getsignal(signal.SIGTERM) == previous


@pytest.fixture
def interruptible():
    """Ctrl-C as a terminal has it; a shell starts what runs in the background with SIGINT ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_a_second_signal_does_not_wait(interruptible):
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(job):
    def broken(batches, model):
        output, loss_function = language_model_objective().forward_step(batches, model)
        return output * float("nan"), loss_function

    saved = []
    poisoned = dataclasses.replace(job, objective=dataclasses.replace(job.objective, forward_step=broken))
    with pytest.raises(TorporError, match="the loss is nan at step 1"):
        run(poisoned, intervals=Intervals(save=1), save=saved.append)
    assert saved == []
