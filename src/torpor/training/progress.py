"""What a run shows and records: a progress line on rank 0, metrics.jsonl and TensorBoard files."""

import json
import sys
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from torpor.training.loop import StepRecord

_WINDOW = 20  # steps that the rate and the estimate look back on


def format_duration(seconds: float) -> str:
    """Write a duration as h:mm:ss or m:ss.

    >>> format_duration(61), format_duration(3661.4)
    ('1:01', '1:01:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_bytes(count: int) -> str:
    """Write a size in MiB or GiB.

    >>> format_bytes(3 * 2**20), format_bytes(3 * 2**30)
    ('3 MiB', '3.0 GiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def step_values(record: "StepRecord") -> dict[str, Any]:
    """The line of metrics.jsonl that a step makes."""
    return {
        "kind": "step",
        "step": record.step,
        **record.metrics,
        "lr": record.lr,
        "grad_norm": record.grad_norm,
        "step_ms": record.seconds * 1e3,
        "tokens_per_s": record.tokens / record.seconds,
        "memory_bytes": record.memory_bytes,
    }


class Display(Protocol):
    """Shows a run to a person."""

    def show_step(self, record: "StepRecord", seconds_left: float) -> None:
        """Show one optimizer step and the estimate of what is left."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Take down what is drawn."""


class PlainDisplay:
    """Plain lines, for logs and pipes.

    Args:
        stream: where to.
        steps: optimizer steps of the run.
        every: steps between two lines; the first and the last step always get one.
    """

    def __init__(self, stream: IO[str], steps: int, every: int):
        self._stream, self._steps, self._every = stream, steps, every
        self._is_first = True

    def show_step(self, record: "StepRecord", seconds_left: float) -> None:
        """Write a line if one is due."""
        if record.step % self._every == 0 or record.step == self._steps or self._is_first:
            self.say(
                f"step {record.step}/{self._steps}  {_describe(record)}  left {format_duration(seconds_left)}"
            )
        self._is_first = False

    def say(self, text: str) -> None:
        """Write a line."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Do nothing: lines stay."""


class BarDisplay:
    """A bar that rich draws on a terminal.

    Args:
        stream: the terminal.
        steps: optimizer steps of the run.
        start_step: steps that were made before.
    """

    def __init__(self, stream: IO[str], steps: int, start_step: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            console=Console(file=stream),
        )
        self._task = self._progress.add_task("step", total=steps, completed=start_step, facts="")
        self._progress.start()

    def show_step(self, record: "StepRecord", seconds_left: float) -> None:
        """Advance the bar."""
        facts = f"{_describe(record)}  left {format_duration(seconds_left)}"
        self._progress.update(self._task, completed=record.step, facts=facts)

    def say(self, text: str) -> None:
        """Write a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


def _describe(record: "StepRecord") -> str:
    mtp = record.metrics.get("mtp_loss")
    return "  ".join(
        [
            f"loss {record.metrics['loss']:.4f}",
            *([f"mtp loss {mtp:.4f}"] if mtp is not None else []),
            f"{record.tokens / record.seconds:,.0f} tokens/s",
            f"{record.seconds * 1e3:,.0f} ms",
            format_bytes(record.memory_bytes),
        ]
    )


class RunLog:
    """Records and shows a run. On ranks other than 0 it does nothing.

    Opened on a folder that holds an earlier part of the run, it drops what that part recorded after
    `start_step`: those steps are made again.

    Args:
        folder: the run folder, in which metrics.jsonl and tensorboard/ are written.
        steps: optimizer steps of the run.
        start_step: steps that were made before.
        every: steps between two lines where no terminal is attached.
        is_speaker: whether this is rank 0.
        stream: where the display goes; stderr by default.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        start_step: int,
        every: int,
        is_speaker: bool,
        stream: IO[str] | None = None,
    ):
        self._steps = steps
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._display: Display | None = None
        self._last_step_end = time.perf_counter()
        if not is_speaker:
            return
        stream = sys.stderr if stream is None else stream
        metrics = folder / "metrics.jsonl"
        _drop_later_records(metrics, start_step)
        self._file = metrics.open("a", encoding="utf-8")
        self._board = _open_tensorboard(folder / "tensorboard", start_step)
        self._display = (
            BarDisplay(stream, steps, start_step) if stream.isatty() else PlainDisplay(stream, steps, every)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is None:
            return
        self._display.close()
        self._file.close()
        self._board.close()

    def say(self, text: str) -> None:
        """Show a line that stays."""
        if self._display is not None:
            self._display.say(text)

    def on_step(self, record: "StepRecord") -> None:
        """Record and show an optimizer step."""
        if self._display is None:
            return
        # The estimate counts what lies between steps too: evaluations and checkpoints.
        now = time.perf_counter()
        self._recent.append(now - self._last_step_end)
        self._last_step_end = now
        left = (self._steps - record.step) * sum(self._recent) / len(self._recent)
        self._write(step_values(record))
        self._display.show_step(record, left)

    def on_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Record and show an evaluation after `step` optimizer steps."""
        if self._display is None:
            return
        values = {f"held_out_{name}": value for name, value in metrics.items()}
        self._write({"kind": "evaluation", "step": step, **values})
        facts = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
        self._display.say(f"step {step}  {facts}")

    def _write(self, values: dict[str, Any]) -> None:
        print(json.dumps(values), file=self._file, flush=True)
        for name, value in values.items():
            if name not in ("kind", "step"):
                self._board.add_scalar(name, value, values["step"])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics.jsonl; a last line that a kill cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def _drop_later_records(path: Path, start_step: int) -> None:
    if not path.exists():
        return
    # A run that starts from nothing is evaluated at step 0 again.
    kept = [record for record in read_metrics(path) if record["step"] <= start_step] if start_step else []
    aside = path.with_suffix(".partial")
    aside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    aside.replace(path)


def _open_tensorboard(folder: Path, start_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    # purge_step makes viewers drop what was recorded for steps that are made again.
    return SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None)
