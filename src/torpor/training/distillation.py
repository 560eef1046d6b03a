"""Distillation: Model-Optimizer runs the teacher beside the student, `losses` compares them.

Model-Optimizer's meta-model carries the teacher's activations from stage to stage beside the student's, runs
it without autograd, and keeps it out of state dicts. Its own criterion, which holds all logits of both models
in FP32, is not used: both models hand over their hidden states instead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from torpor.megatron.graphed_projection import GraphedProjection, can_be_recorded
from torpor.megatron.hidden_states import (
    OutputProjection,
    check_output_layer,
    find_language_model,
    hand_over_projection,
    set_within,
)
from torpor.training.data import Batch
from torpor.training.loop import LossFunction, Objective
from torpor.training.losses import LossSettings, TopTokens, distillation_loss
from torpor.training.teacher_cache import TeacherBatch


def build_distillation_model(student: torch.nn.Module, teacher: torch.nn.Module) -> torch.nn.Module:
    """Turn a student into Model-Optimizer's meta-model, which runs the teacher beside it.

    Call `freeze_mtp` on both before, so that neither runs its MTP layers; without it both do, as upstream has
    it: the student trains its MTP layers and the teacher's run for nothing.

    Args:
        student: bare chunk with weights; its class is changed in place and its names stay as they are.
        teacher: bare chunk with weights, of the same pipeline stage; becomes untrainable.

    Returns:
        The student, converted. Its state dicts do not show the teacher.

    Raises:
        UnsupportedModelError: an output layer does more than to multiply by its weight.
    """
    import modelopt.torch.distill as mtd
    from modelopt.torch.distill.plugins.megatron import (
        DistillationConfig,
        LogitsAndIntermediatesLossBalancer,
        adjust_distillation_model_for_mcore,
    )

    for model in (student, teacher):
        check_output_layer(model)
    model = mtd.convert(
        student,
        mode=[
            (
                "kd_loss",
                {
                    "teacher_model": teacher,
                    # Nothing is captured: see `distillation_objective`. The balancer is not asked either, but
                    # without one Model-Optimizer warns of its missing criterion.
                    "criterion": {},
                    "loss_balancer": LogitsAndIntermediatesLossBalancer(skip_original_loss=True),
                },
            )
        ],
    )
    adjust_distillation_model_for_mcore(model, DistillationConfig(skip_lm_loss=True))
    _keep_mtp_loss(model)
    return model


def _keep_mtp_loss(model: Any) -> None:
    """Have MTP layers that are awake trained by their own loss, quantised or not.

    Model-Optimizer gives those that were left out of a student's quantisation a loss of zeros
    (modelopt/torch/distill/plugins/megatron.py, `_mtp_excluded_from_quantization`); here they are awake
    because the user wants them trained.
    """
    otherwise = model.compute_language_model_loss

    def compute_language_model_loss(self: Any, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        # While asleep the config says that there are none.
        if self._lm_loss_call_count < (self.config.mtp_num_layers or 0):
            self._lm_loss_call_count += 1
            return type(self).compute_language_model_loss(self, labels, logits)
        return otherwise(labels, logits)

    model.compute_language_model_loss = MethodType(compute_language_model_loss, model)


class _Teacher:
    """The teacher of a meta-model, which runs it, or whose turn has come before from a CUDA graph."""

    def __init__(self) -> None:
        self._model: torch.nn.Module | None = None
        self._graphed: GraphedProjection | None = None

    @contextmanager
    def beside(self, meta_model: Any, batch: Batch) -> Iterator[Callable[[], OutputProjection | None]]:
        """Yield what returns, after the meta-model's forward in the block, the teacher's projection."""
        teacher = meta_model.teacher_model
        if self._model is not teacher:
            self._model = teacher
            self._graphed = GraphedProjection(teacher) if can_be_recorded(teacher) else None
        if self._graphed is None:
            with hand_over_projection(teacher) as handover:
                yield handover.take
            return
        projection = self._graphed.run(batch.tokens_BS, batch.positions_BS, batch.labels_BS)
        with set_within(teacher, "forward", lambda *_, **__: None):
            yield lambda: projection


def distillation_objective(settings: LossSettings) -> Objective:
    """The mean loss per token; in evaluation the student's cross-entropy too.

    Args:
        settings: what is minimised.

    Returns:
        An objective for models of `build_distillation_model`.
    """
    teacher = _Teacher()

    def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
        batch = next(batches)
        meta_model = find_language_model(model)
        with (
            teacher.beside(meta_model, batch) as take_teacher,
            hand_over_projection(meta_model) as student,
        ):
            output = model(
                input_ids=batch.tokens_BS,
                position_ids=batch.positions_BS,
                attention_mask=None,
                labels=batch.labels_BS,
            )

        def loss(_: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            ours, theirs = student.take(), take_teacher()
            assert ours is not None, "the schedule asks the last stage alone"
            assert theirs is not None
            return _loss(ours, theirs, batch, settings, is_training=meta_model.training)

        return output, loss

    return _objective(settings, forward_step)


def cached_distillation_objective(settings: LossSettings) -> Objective:
    """The same from a teacher's likeliest tokens on disk: batches are those of `WindowsWithTeacher`.

    Args:
        settings: what is minimised, with a `top_k`.

    Returns:
        An objective for the student alone.
    """

    def forward_step(
        batches: Iterator[TeacherBatch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, LossFunction]:
        batch = next(batches)
        with hand_over_projection(model) as student:
            output = model(
                input_ids=batch.tokens_BS,
                position_ids=batch.positions_BS,
                attention_mask=None,
                labels=batch.labels_BS,
            )

        def loss(_: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            ours = student.take()
            assert ours is not None, "the schedule asks the last stage alone"
            likeliest = (batch.teacher_ids_BSK, batch.teacher_logits_BSK)
            theirs = TopTokens(*(values_BSK.transpose(0, 1) for values_BSK in likeliest))
            return _loss(ours, theirs, batch, settings, is_training=model.training)

        return output, loss

    return _objective(settings, forward_step)


def _objective(settings: LossSettings, forward_step: Any) -> Objective:
    # The divergence has a name of its own where the loss is something else.
    divergence = ("divergence",) if settings.temperature != 1.0 or settings.cross_entropy_weight else ()
    entropy = ("cross_entropy",) if settings.cross_entropy_weight else ()
    return Objective(
        forward_step,
        training_metrics=("loss", *divergence, *entropy),
        held_out_metrics=("loss", *divergence, "cross_entropy"),
    )


def _loss(
    student: OutputProjection,
    teacher: OutputProjection | TopTokens,
    batch: Batch,
    settings: LossSettings,
    *,
    is_training: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    from megatron.core import parallel_state

    needs_labels = settings.cross_entropy_weight > 0 or not is_training
    result = distillation_loss(
        student,
        teacher,
        settings,
        labels_BS=batch.labels_BS if needs_labels else None,
        cp_group=parallel_state.get_context_parallel_group(),
    )
    metrics = {"loss": result.mean, "divergence": result.divergence}
    if result.cross_entropy is not None:
        metrics["cross_entropy"] = result.cross_entropy
    return result.loss, metrics


def shapes_between_stages(model: torch.nn.Module, *, sequence_length: int, micro_batch_size: int) -> Any:
    """What the pipeline schedule needs to know: student and teacher activations travel side by side.

    Args:
        model: the converted chunk, wrapped or not.
        sequence_length: tokens in a window.
        micro_batch_size: windows in a micro-batch.

    Returns:
        The schedule's `adjust_tensor_shapes_fn`, or None without pipeline stages.
    """
    from modelopt.torch.distill.plugins.megatron import get_tensor_shapes_adjust_fn_for_distillation

    return get_tensor_shapes_adjust_fn_for_distillation(
        model, seq_length=sequence_length, micro_batch_size=micro_batch_size, decoder_seq_length=None
    )
