"""Logit distillation with Model-Optimizer's Megatron plugin."""

from collections.abc import Iterator
from typing import Any

import torch

from torpor.training.data import Batch
from torpor.training.loop import LossFunction, Objective


def build_distillation_model(
    student: torch.nn.Module, teacher: torch.nn.Module, *, temperature: float
) -> torch.nn.Module:
    """Turn a student into Model-Optimizer's meta-model, which runs the teacher beside it.

    Call `freeze_mtp` on both before, so that neither runs its MTP layers; without it both do, as upstream has
    it: the student trains its MTP layers and the teacher's run for nothing.

    Args:
        student: bare chunk with weights; its class is changed in place and its names stay as they are.
        teacher: bare chunk with weights, of the same pipeline stage; becomes untrainable.
        temperature: divides the logits of both before the Kullback-Leibler divergence.

    Returns:
        The student, converted. Its state dicts do not show the teacher.
    """
    import modelopt.torch.distill as mtd
    from modelopt.torch.distill.plugins.megatron import (
        DistillationConfig,
        adjust_distillation_model_for_mcore,
        setup_distillation_config,
    )

    # skip_lm_loss: the divergence alone is trained on; no cross-entropy runs in training.
    settings = setup_distillation_config(
        DistillationConfig(skip_lm_loss=True, logit_kl_temperature=temperature),
        student.config,
        teacher.config,
    )
    model = mtd.convert(
        student,
        mode=[
            (
                "kd_loss",
                {
                    "teacher_model": teacher,
                    "criterion": settings.criterion,
                    "loss_balancer": settings.loss_balancer,
                },
            )
        ],
    )
    adjust_distillation_model_for_mcore(model, settings)
    if hasattr(model, "output_layer"):
        # After Model-Optimizer's own hook, which has kept the original by then.
        model.output_layer.register_forward_hook(_copy_for_cross_entropy)
    return model


def _copy_for_cross_entropy(
    module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any] | None:
    """Give the cross-entropy of an evaluation its own logits.

    Megatron's vocabulary-parallel cross-entropy subtracts, exponentiates and divides in place
    (tensor_parallel/cross_entropy.py). In FP32 that is the very tensor which Model-Optimizer compares with
    the teacher's later; in BF16 the conversion to FP32 has made a copy.
    """
    logits, bias = output
    if module.training or logits.dtype != torch.float32:
        return None
    return logits.clone(), bias


def distillation_objective() -> Objective:
    """The mean divergence KL(teacher || student) per token; in evaluation the student's cross-entropy too."""

    def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
        batch = next(batches)
        output = model(
            input_ids=batch.tokens_BS,
            position_ids=batch.positions_BS,
            attention_mask=None,
            labels=batch.labels_BS,
        )
        return output, lambda losses_BS: _divergence(_unwrap(model), losses_BS)

    return Objective(forward_step, training_metrics=("loss",), held_out_metrics=("loss", "cross_entropy"))


def _divergence(
    model: Any,
    losses_BS: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    cross_entropy = losses_BS.float().mean()  # 0 in training, where it is skipped
    losses = model.compute_kd_loss(student_loss=cross_entropy, loss_reduction_fn=_mean_over_tokens)
    loss = losses["kd_loss"]
    metrics = {"loss": loss.detach().clone()}
    if not model.training:
        metrics["cross_entropy"] = cross_entropy.detach().clone()
    return loss, metrics


def _mean_over_tokens(loss: tuple[torch.Tensor, bool, bool]) -> torch.Tensor:
    """Mean of Model-Optimizer's per-token losses; over a split vocabulary each rank holds a share of the sum.

    Args:
        loss: losses [b, s]; whether they are summed over tensor-parallel ranks; whether s is split over them.

    Returns:
        Scalar, equal on all tensor-parallel ranks.
    """
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    losses_BS, is_partial, _ = loss
    mean = losses_BS.float().mean()
    # Summed forward, identity backward: the gradient of the sum with respect to each rank's share is 1, where
    # autograd's own all-reduce would add up the ones of all ranks.
    return reduce_from_tensor_model_parallel_region(mean) if is_partial else mean


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


def _unwrap(model: torch.nn.Module) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model
