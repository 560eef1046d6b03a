"""The training loop: Megatron's schedules, DDP and optimizer driven by a plain description of the job.

It knows nothing of distillation, files or screens. What is trained comes as a `Job`, what happens between
steps as `LoopHooks`.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from torpor.errors import TorporError
from torpor.megatron.host import current_device
from torpor.training.config import OptimizationConfig
from torpor.training.data import Batch, BatchPlan, Windows, held_out_batches, training_batches
from torpor.training.schedule import build_schedule

Metrics = dict[str, torch.Tensor]
LossFunction = Callable[
    [torch.Tensor], tuple[torch.Tensor, Metrics] | tuple[torch.Tensor, torch.Tensor, Metrics]
]
ForwardStep = Callable[[Iterator[Batch], torch.nn.Module], tuple[torch.Tensor, LossFunction]]


@dataclass(frozen=True)
class Objective:
    """What a step minimises.

    Args:
        forward_step: takes the batch iterator and a model chunk; returns the model's output and the function
            that turns it, on the last stage, into the loss and its metrics by name. The loss is a mean
            (scalar) or, of a model built with `per_token_loss`, a sum (scalar) and how many tokens it is over
            (int32). A metric is a mean (scalar) or a sum and how many it is over ([2]).
        training_metrics: names of the metrics in training, the first of which is the loss.
        held_out_metrics: the same in evaluation.
    """

    forward_step: ForwardStep
    training_metrics: tuple[str, ...] = ("loss",)
    held_out_metrics: tuple[str, ...] = ("loss",)


@dataclass(frozen=True)
class Job:
    """A model ready to be trained, its data and its objective.

    Args:
        chunks: this rank's DDP-wrapped chunks, see `wrap_for_training`.
        optimizer: a MegatronOptimizer over them.
        scheduler: see `schedule.build_schedule`.
        objective: what is minimised.
        training_batches: optimizer step (0-based) -> this rank's micro-batches.
        held_out_batches: evaluation batch (0-based) -> this rank's micro-batches.
        num_micro_batches: per step on this rank.
        micro_batch_size: windows in a micro-batch.
        sequence_length: tokens in a window.
        tokens_per_step: over all ranks.
        adjust_tensor_shapes: what a pipeline schedule needs to know about unusual activations, or None.
    """

    chunks: Sequence[torch.nn.Module]
    optimizer: Any
    scheduler: Any
    objective: Objective
    training_batches: Callable[[int], Iterator[Batch]]
    held_out_batches: Callable[[int], Iterator[Batch]]
    num_micro_batches: int
    micro_batch_size: int
    sequence_length: int
    tokens_per_step: int
    adjust_tensor_shapes: Callable[..., Any] | None = None


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step did; the same on every rank but for the time and the memory."""

    step: int  # from 1
    metrics: dict[str, float]
    lr: float
    grad_norm: float
    seconds: float
    tokens: int
    memory_bytes: int  # the peak of this rank so far


def _ignore(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class LoopHooks:
    """What happens between steps. Every hook runs on every rank.

    Args:
        on_step: after each optimizer step.
        on_evaluation: after each evaluation, with the number of steps done and the metrics.
        save: when a checkpoint is due, with the number of steps done.
    """

    on_step: Callable[[StepRecord], None] = _ignore
    on_evaluation: Callable[[int, dict[str, float]], None] = _ignore
    save: Callable[[int], None] = _ignore


@dataclass
class Intervals:
    """How often the loop does what, in steps; 0 is never."""

    evaluate: int = 0
    evaluation_batches: int = 0
    save: int = 0


@dataclass
class Outcome:
    """How a loop ended: with all its steps done, or early at a signal, after a checkpoint."""

    step: int
    signal_number: int | None = None
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)


def wrap_for_training(
    chunks: Sequence[torch.nn.Module], *, distributed_optimizer: bool = False
) -> list[torch.nn.Module]:
    """Wrap bare chunks in Megatron's DDP and tell their config how gradients are finished.

    Gradients are accumulated and reduced in FP32 whatever the parameters' type. Parameters without
    `requires_grad` get no buffer.

    Args:
        chunks: this rank's model chunks.
        distributed_optimizer: shard the optimizer's state over the data-parallel ranks.

    Returns:
        The wrapped chunks.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.utils import get_model_config

    wrapped: list[torch.nn.Module] = []
    for index, chunk in enumerate(chunks):
        config = get_model_config(chunk)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
        )
        ddp = DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        ddp.broadcast_params()
        config.finalize_model_grads_func = finalize_model_grads
        wrapped.append(ddp)
    return wrapped


def prepare_job(
    chunks: Sequence[torch.nn.Module],
    settings: OptimizationConfig,
    windows: Windows,
    objective: Objective,
    *,
    steps: int,
    adjust_tensor_shapes: Callable[..., Any] | None = None,
) -> Job:
    """Wrap a model in DDP and give it an optimizer, a schedule and its batches.

    Call it on every rank, with the process groups of the layout in place. To resume, load the checkpoint into
    the job's chunks and optimizer and then call `job.scheduler.step(steps made)`.

    Args:
        chunks: this rank's bare chunks, with weights and, if wanted, frozen.
        settings: batch sizes, precision, optimizer and schedule.
        windows: the data.
        objective: what is minimised.
        steps: optimizer steps of the whole run.
        adjust_tensor_shapes: see `Job`.

    Returns:
        The job.

    Raises:
        ConfigError: the global batch does not divide over the ranks, or the warm-up leaves no step.
    """
    from megatron.core.utils import get_model_config

    from torpor.megatron.optimizer import build_optimizer

    plan = BatchPlan.of_this_rank(settings)
    settings.check_batch(plan.data_size)
    device = current_device()
    wrapped = wrap_for_training(chunks, distributed_optimizer=settings.distributed_optimizer)
    optimizer = build_optimizer(
        wrapped,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        betas=settings.betas,
        eps=settings.eps,
        clip_grad=settings.clip_grad,
        distributed=settings.distributed_optimizer,
        dtype=torch.bfloat16 if settings.dtype == "bf16" else torch.float32,
    )
    for chunk in wrapped:
        chunk.train()
        get_model_config(chunk).grad_scale_func = optimizer.scale_loss
    return Job(
        chunks=wrapped,
        optimizer=optimizer,
        scheduler=build_schedule(optimizer, settings, steps),
        objective=objective,
        training_batches=lambda step: training_batches(windows, plan, step, device),
        held_out_batches=lambda index: held_out_batches(windows, plan, index, device),
        num_micro_batches=plan.num_micro_batches,
        micro_batch_size=settings.micro_batch_size,
        sequence_length=settings.sequence_length,
        tokens_per_step=settings.global_batch_size * settings.sequence_length,
        adjust_tensor_shapes=adjust_tensor_shapes,
    )


def language_model_objective() -> Objective:
    """Next-token cross-entropy; where MTP layers are awake, Megatron adds their loss to the gradients."""

    def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
        batch = next(batches)
        output = model(
            input_ids=batch.tokens_BS,
            position_ids=batch.positions_BS,
            attention_mask=None,
            labels=batch.labels_BS,
        )
        return output, _mean_loss

    return Objective(forward_step)


def _mean_loss(losses_BS: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    from megatron.core import parallel_state

    mean = losses_BS.float().mean()
    # The schedule multiplies what it gets by the context-parallel size, for losses that every rank has summed
    # up over all (pipeline_parallel/schedules.py). This one is over the rank's own tokens.
    return mean / parallel_state.get_context_parallel_world_size(), {"loss": mean.detach()}


class StopRequest:
    """Turns SIGTERM and SIGINT into a wish that the loop honours after the running step, on all ranks."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            # Asked twice: whoever asks does not want to wait for a checkpoint.
            signal.signal(number, self._previous[number])
            signal.raise_signal(number)
            return
        self.signal_number = number

    def agreed(self, device: torch.device) -> int | None:
        """The signal that any rank has received, or None; the same on every rank."""
        if torch.distributed.get_world_size() == 1:
            return self.signal_number
        number = torch.tensor([self.signal_number or 0], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
        return int(number.item()) or None


def train(
    job: Job, *, steps: int, start_step: int = 0, intervals: Intervals, hooks: LoopHooks, stop: StopRequest
) -> Outcome:
    """Train from `start_step` to `steps`, evaluating and saving on the way.

    A fresh run is evaluated before its first step, and the last step is always evaluated and saved. At a
    signal the running step is finished and saved.

    Args:
        job: what to train.
        steps: optimizer steps of the whole run.
        start_step: steps that were made before.
        intervals: how often to evaluate and save.
        hooks: what happens between steps.
        stop: says when to end early; entered by the caller.

    Returns:
        How it ended.

    Raises:
        TorporError: the loss is not a finite number any more; nothing is saved after that.
    """
    device = current_device()
    outcome = Outcome(start_step)

    def evaluate_and_report(step: int) -> None:
        evaluation = evaluate(job, intervals.evaluation_batches)
        outcome.evaluations.append((step, evaluation))
        hooks.on_evaluation(step, evaluation)

    if start_step == 0 and intervals.evaluation_batches:
        evaluate_and_report(0)
    for step in range(start_step, steps):
        record = run_step(job, step)
        hooks.on_step(record)
        loss = record.metrics[job.objective.training_metrics[0]]
        if not math.isfinite(loss):
            raise TorporError(
                f"the loss is {loss} at step {record.step} (learning rate {record.lr:g}, gradient norm "
                f"{record.grad_norm:g})\n  The last checkpoint is from before. Lower `lr`, or lengthen "
                "`warmup_steps`."
            )
        outcome.step = record.step
        outcome.signal_number = stop.agreed(device)
        is_last = record.step == steps
        if intervals.evaluation_batches and (is_last or _is_due(record.step, intervals.evaluate)):
            evaluate_and_report(record.step)
        if is_last or outcome.signal_number or _is_due(record.step, intervals.save):
            hooks.save(record.step)
        if outcome.signal_number and not is_last:
            return outcome
    return outcome


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def run_step(job: Job, step: int) -> StepRecord:
    """Make optimizer step `step` (0-based).

    Returns:
        What it did.
    """
    started = time.perf_counter()
    for chunk in job.chunks:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()
    per_micro_batch = _forward_backward(job, job.training_batches(step), forward_only=False)
    job.scheduler.step(1)
    _, grad_norm, _ = job.optimizer.step()
    metrics = _reduce(per_micro_batch, job.objective.training_metrics)
    metrics |= _awake_mtp_metrics(job)
    return StepRecord(
        step=step + 1,
        metrics=metrics,
        lr=max(float(group["lr"]) for group in job.optimizer.param_groups),
        grad_norm=float(grad_norm or 0.0),
        seconds=time.perf_counter() - started,
        tokens=job.tokens_per_step,
        memory_bytes=_peak_memory(),
    )


def evaluate(job: Job, num_batches: int) -> dict[str, float]:
    """Mean held-out metrics over `num_batches` global batches; the model is left in training mode."""
    for chunk in job.chunks:
        chunk.eval()
    per_micro_batch: list[Metrics] = []
    with torch.no_grad():
        for index in range(num_batches):
            per_micro_batch += _forward_backward(job, job.held_out_batches(index), forward_only=True)
    for chunk in job.chunks:
        chunk.train()
    return _reduce(per_micro_batch, job.objective.held_out_metrics)


def _forward_backward(job: Job, batches: Iterator[Batch], *, forward_only: bool) -> list[Metrics]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    data: Any = batches if len(job.chunks) == 1 else [batches] * len(job.chunks)
    return get_forward_backward_func()(
        forward_step_func=job.objective.forward_step,
        data_iterator=data,
        model=list(job.chunks),
        num_microbatches=job.num_micro_batches,
        seq_length=job.sequence_length,
        micro_batch_size=job.micro_batch_size,
        forward_only=forward_only,
        adjust_tensor_shapes_fn=job.adjust_tensor_shapes,
    )


def _reduce(per_micro_batch: list[Metrics], names: Sequence[str]) -> dict[str, float]:
    """Mean of the metrics over micro-batches and data-parallel ranks, known to every pipeline stage."""
    from megatron.core import parallel_state

    # A sum and a count of each.
    totals = torch.zeros(len(names), 2, dtype=torch.float64, device=current_device())
    if per_micro_batch:  # empty but on the last stage
        for index, name in enumerate(names):
            for metrics in per_micro_batch:
                value = metrics[name].double()
                totals[index] += value if value.dim() else torch.stack([value, torch.ones_like(value)])
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(totals, group=group)
    _broadcast_from_last_stage(totals)
    return dict(zip(names, (totals[:, 0] / totals[:, 1]).tolist(), strict=True))


def _broadcast_from_last_stage(values: torch.Tensor) -> None:
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        torch.distributed.broadcast(
            values,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )


def _awake_mtp_metrics(job: Job) -> dict[str, float]:
    """Loss and acceptance (share of right guesses) of MTP layers that ran in this step; empty if none did."""
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.core.utils import get_model_config

    if not getattr(get_model_config(job.chunks[0]), "mtp_num_layers", None):
        return {}
    tracker = MTPLossLoggingHelper.tracker
    sums = torch.zeros(3, dtype=torch.float32, device=current_device())  # loss, right guesses, guesses
    if "loss_values" in tracker:
        # The mean over the MTP layers; the tracker adds up over micro-batches.
        sums[0] = tracker["loss_values"].mean() / job.num_micro_batches
        sums[1] = tracker["correct_values"].sum()
        sums[2] = tracker["total_values"].sum()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(sums, group=group)
        sums[0] /= group.size()
        MTPLossLoggingHelper.clean_metrics_in_tracker()
    _broadcast_from_last_stage(sums)
    loss, correct, total = sums.tolist()
    return {"mtp_loss": loss, "mtp_acceptance": correct / total} if total else {}


def _peak_memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
