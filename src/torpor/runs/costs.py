"""What a distillation step costs with the heads asleep, awake and absent: side by side, in one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from torpor.checkpoints.folder import Folder
    from torpor.training.config import OptimizationConfig
    from torpor.training.data import PackedWindows
    from torpor.training.loop import Job


@dataclass(frozen=True)
class MeasuredCost:
    """What the steps of one arrangement cost.

    Args:
        arrangement: "asleep", "awake" or "absent".
        seconds: Duration of each measured step.
        weights_bytes: Parameters and buffers of student and teacher.
        state_bytes: Gradients and optimizer state.
        saved_bytes: Tensors kept from forward for backward, parameters not counted.
    """

    arrangement: str
    seconds: tuple[float, ...]
    weights_bytes: int
    state_bytes: int
    saved_bytes: int


ARRANGEMENTS = ("asleep", "awake", "absent")


def measure_costs(
    student: "Folder",
    teacher: "Folder",
    settings: "OptimizationConfig",
    windows: "PackedWindows",
    *,
    warmup: int,
    steps: int,
    on_round: Callable[[int], None] = lambda done: None,
) -> list[MeasuredCost]:
    """Run the same distillation steps in the three arrangements, taking turns.

    Turns, because a machine's speed drifts: what slows one arrangement down slows its neighbours too, and
    who goes first changes from round to round.

    Args:
        student: Folder of the student.
        teacher: Folder of the teacher.
        settings: Batch, precision and optimizer; one micro-batch a step, so that what is saved is a peak.
        windows: The text.
        warmup: Rounds that are not counted.
        steps: Rounds that are counted.
        on_round: Called after each round with the number of rounds done.

    Returns:
        One entry for each of `ARRANGEMENTS`, in that order.
    """
    from torpor.training.loop import run_step

    jobs = {name: build_job(name, student, teacher, settings, windows) for name in ARRANGEMENTS}
    seconds: dict[str, list[float]] = {name: [] for name in ARRANGEMENTS}
    saved: dict[str, int] = {}
    for index in range(warmup + steps):
        first = index % len(ARRANGEMENTS)
        for name in ARRANGEMENTS[first:] + ARRANGEMENTS[:first]:
            if index == 0:
                with count_saved_bytes(jobs[name]) as count:
                    run_step(jobs[name], index)
                saved[name] = count()
                continue
            record = run_step(jobs[name], index)
            if index >= warmup:
                seconds[name].append(record.seconds)
        on_round(index + 1)
    return [
        MeasuredCost(
            name, tuple(seconds[name]), weights_bytes(jobs[name]), state_bytes(jobs[name]), saved[name]
        )
        for name in ARRANGEMENTS
    ]


def build_job(
    arrangement: str,
    student: "Folder",
    teacher: "Folder",
    settings: "OptimizationConfig",
    windows: "PackedWindows",
) -> "Job":
    """Build a distillation of `student` from `teacher` on this one rank, the heads arranged as asked.

    Args:
        arrangement: One of `ARRANGEMENTS`.
        student: Folder of the student.
        teacher: Folder of the teacher.
        settings: Batch, precision and optimizer.
        windows: The text.

    Returns:
        A job that `run_step` takes.
    """
    import torch

    from torpor.dormancy import freeze_mtp
    from torpor.megatron.models import build_model
    from torpor.megatron.parallel import Layout
    from torpor.megatron.weights import load_weights
    from torpor.training.distillation import build_distillation_model, distillation_objective
    from torpor.training.loop import prepare_job
    from torpor.training.losses import LossSettings

    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32

    def load(folder: "Folder") -> Any:
        whole = build_model(folder.config, Layout(), dtype)
        load_weights(whole, folder)
        if arrangement == "asleep":
            freeze_mtp(whole)
        if arrangement != "absent":
            return whole[0]
        trunk = build_model(folder.config, Layout(), dtype, mtp=False)
        values = whole[0].state_dict()
        trunk[0].load_state_dict({name: values[name] for name in trunk[0].state_dict()})
        return trunk[0]

    model = build_distillation_model(load(student), load(teacher))
    return prepare_job([model], settings, windows, distillation_objective(LossSettings()), steps=10**6)


@contextmanager
def count_saved_bytes(job: "Job") -> Iterator[Callable[[], int]]:
    """Count the memory that autograd keeps from forward for backward inside the block.

    A storage saved by several operations counts once; the weights' own do not count. Whatever is saved is
    kept until the block ends, so that no address is given out twice: the count is the same every time.

    Yields:
        A function that returns the bytes counted so far.
    """
    import torch

    weights = {tensor.untyped_storage().data_ptr() for tensor in weights_of(job)}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: "torch.Tensor") -> "torch.Tensor":
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(storage.nbytes() for storage in storages.values())


def weights_of(job: "Job") -> list["torch.Tensor"]:
    """Parameters and buffers of the student and of the teacher that the job runs beside it."""
    tensors: dict[int, torch.Tensor] = {}
    for chunk in job.chunks:
        for tensor in [*chunk.module.parameters(), *chunk.module.buffers()]:
            tensors[id(tensor)] = tensor
    return list(tensors.values())


def weights_bytes(job: "Job") -> int:
    """Size of `weights_of`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in weights_of(job))


def state_bytes(job: "Job") -> int:
    """Size of the gradients that DDP allocated and of the optimizer's state."""
    optimizers = getattr(job.optimizer, "chained_optimizers", [job.optimizer])
    states = [
        value
        for optimizer in optimizers
        for state in optimizer.optimizer.state.values()
        for value in state.values()
        if hasattr(value, "element_size")
    ]
    gradients = [p.main_grad for p in weights_of(job) if getattr(p, "main_grad", None) is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in [*states, *gradients])
