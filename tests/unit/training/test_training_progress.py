"""What a run shows and records."""

import io
import json

import pytest

from torpor.training.loop import StepRecord
from torpor.training.progress import RunLog, format_bytes, format_duration, read_metrics


class Terminal(io.StringIO):
    def isatty(self):
        return True


def record(step, loss=2.0, **metrics):
    return StepRecord(
        step=step,
        metrics={"loss": loss, **metrics},
        lr=0.1,
        grad_norm=1.5,
        seconds=0.5,
        tokens=1000,
        memory_bytes=3 * 2**30,
    )


def log_steps(tmp_path, stream, numbers, *, start_step=0, every=1, is_speaker=True):
    with RunLog(
        tmp_path, steps=10, start_step=start_step, every=every, is_speaker=is_speaker, stream=stream
    ) as log:
        for number in numbers:
            log.on_step(record(number))
        log.on_evaluation(numbers[-1], {"loss": 1.25})


def test_a_plain_line_has_everything_a_person_asks_for(tmp_path):
    stream = io.StringIO()
    with RunLog(tmp_path, steps=10, start_step=0, every=1, is_speaker=True, stream=stream) as log:
        log.on_step(record(1, loss=2.5, mtp_loss=3.5))
    line = stream.getvalue()
    for part in (
        "step 1/10",
        "loss 2.5000",
        "mtp loss 3.5000",
        "2,000 tokens/s",
        "500 ms",
        "3.0 GiB",
        "left 0:",
    ):
        assert part in line


def test_lines_come_at_the_interval_and_at_both_ends(tmp_path):
    stream = io.StringIO()
    log_steps(tmp_path, stream, range(1, 11), every=4)
    steps = [line.split()[1] for line in stream.getvalue().splitlines() if "tokens/s" in line]
    assert steps == ["1/10", "4/10", "8/10", "10/10"]


def test_a_terminal_gets_a_bar(tmp_path):
    stream = Terminal()
    log_steps(tmp_path, stream, [1, 2])
    assert "2/10" in stream.getvalue()
    assert "tokens/s" in stream.getvalue()
    assert "held out loss 1.2500" in stream.getvalue()


def test_only_rank_0_speaks_and_writes(tmp_path):
    stream = io.StringIO()
    log_steps(tmp_path, stream, [1], is_speaker=False)
    assert stream.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_one_object_per_line_and_tensorboard_has_them_too(tmp_path):
    log_steps(tmp_path, io.StringIO(), [1, 2])
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {
            "kind": "step",
            "step": step,
            "loss": 2.0,
            "lr": 0.1,
            "grad_norm": 1.5,
            "step_ms": 500.0,
            "tokens_per_s": 2000.0,
            "memory_bytes": 3 * 2**30,
        }
        for step in (1, 2)
    ] + [{"kind": "evaluation", "step": 2, "held_out_loss": 1.25}]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("loss")] == [1, 2]
    assert board.Scalars("held_out_loss")[0].value == 1.25


def test_a_continued_run_drops_what_is_made_again_and_a_line_cut_by_a_kill(tmp_path):
    log_steps(tmp_path, io.StringIO(), [1, 2, 3, 4])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    log_steps(tmp_path, io.StringIO(), [3, 4], start_step=2)
    steps = [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "step"]
    assert steps == [1, 2, 3, 4]
    json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (61, "1:01"), (3661.4, "1:01:01"), (90000, "25:00:00")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_sizes():
    assert (format_bytes(3 * 2**20), format_bytes(3 * 2**29)) == ("3 MiB", "1.5 GiB")
