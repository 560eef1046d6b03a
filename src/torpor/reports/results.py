"""What a report shows: plain values, made by a run, read by `html` and nothing else."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Curve:
    """One line of a plot.

    Args:
        label: What the line shows; two or three words.
        steps: x values, ascending.
        values: y values, as many as `steps`.
        marked: Whether each point gets a dot (evaluations, of which there are few).
    """

    label: str
    steps: tuple[float, ...]
    values: tuple[float, ...]
    marked: bool = False

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.values):
            raise ValueError(
                f"curve {self.label!r} has {len(self.steps)} steps but {len(self.values)} values"
            )


@dataclass(frozen=True)
class Plot:
    """A line plot with a title and a sentence that says how to read it.

    Args:
        title: Heading.
        x_label: Name of the x axis.
        y_label: Name of the y axis, with its unit.
        curves: The lines.
        caption: What to see in it.
        reference: A horizontal line to compare with, as (label, value); chance, for instance.
        percent: Whether y values are fractions to be written as percentages.
    """

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    caption: str
    reference: tuple[str, float] | None = None
    percent: bool = False


@dataclass(frozen=True)
class Acceptance:
    """How often a drafted token is the one the trunk itself would choose.

    Args:
        label: Which model.
        accepted: Drafts that equal the trunk's choice.
        drafted: Drafts made.
        chance: Rate that the best constant draft (always the same token) would have reached on the same text.
    """

    label: str
    accepted: int
    drafted: int
    chance: float

    @property
    def rate(self) -> float:
        """Accepted drafts as a fraction of all drafts."""
        return self.accepted / self.drafted


@dataclass(frozen=True)
class StepCost:
    """What one training step costs in one arrangement of the heads.

    Args:
        label: The arrangement.
        milliseconds: Duration of each measured step.
        weights_bytes: Parameters and buffers.
        state_bytes: Gradients and optimizer state.
        saved_bytes: Tensors kept from forward for backward, parameters not counted.
    """

    label: str
    milliseconds: tuple[float, ...]
    weights_bytes: int
    state_bytes: int
    saved_bytes: int

    @property
    def median_ms(self) -> float:
        """Median duration of a step."""
        ordered = sorted(self.milliseconds)
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(frozen=True)
class TensorProof:
    """One MTP tensor before and after.

    Args:
        name: Hugging Face name.
        dtype: As safetensors writes it, `BF16`.
        shape: Dimensions.
        before: SHA-256 of the payload in the source, hexadecimal.
        after: The same in the export; None where the tensor is missing.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    before: str
    after: str | None

    @property
    def identical(self) -> bool:
        """Whether both payloads have the same hash."""
        return self.before == self.after


@dataclass(frozen=True)
class Stage:
    """One part of a run.

    Args:
        name: What it did.
        seconds: How long it took.
        command: What a user would type to do the same; None where it has no command of its own.
        detail: What came out of it, in a sentence.
    """

    name: str
    seconds: float
    detail: str
    command: str | None = None


@dataclass(frozen=True)
class RunReport:
    """Everything one `report.html` shows.

    Args:
        title: Heading of the page.
        summary: One sentence below it.
        passed: Whether every check held.
        verdict: One line for each check.
        figures: The few numbers to remember, as (value, what it is).
        plots: Curves over the run.
        acceptances: Drafting rates of the models involved.
        costs: Step costs; the first is the arrangement that Torpor makes.
        cost_note: How the costs were measured.
        tensors: Every MTP tensor, before and after.
        stages: What was run, in order.
        facts: Machine, versions and sizes, as (name, value).
        configuration: The configuration file, verbatim.
        seconds: Duration of the whole run.
        created: When, as text.
        notes: What the reader should know before believing a number.
    """

    title: str
    summary: str
    passed: bool
    verdict: tuple[str, ...]
    figures: tuple[tuple[str, str], ...]
    plots: tuple[Plot, ...]
    acceptances: tuple[Acceptance, ...]
    costs: tuple[StepCost, ...]
    cost_note: str
    tensors: tuple[TensorProof, ...]
    stages: tuple[Stage, ...]
    facts: tuple[tuple[str, str], ...]
    configuration: str
    seconds: float
    created: str
    notes: tuple[str, ...] = field(default=())
