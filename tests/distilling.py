"""Distillation as in a user's own script: Model-Optimizer's Megatron plugin, and `freeze_mtp`."""

from typing import Any

import torch

from tiny_models import batch, gradients
from torpor import freeze_mtp
from torpor.modelopt import setup_distillation_config


def convert(student: torch.nn.Module, teacher: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """Turn the student into Model-Optimizer's DistillationModel; the settings are a DistillationConfig's."""
    import modelopt.torch.distill as mtd
    from modelopt.torch.distill.plugins import megatron

    config = setup_distillation_config(
        megatron.DistillationConfig(**settings), student.config, teacher.config
    )
    mode = {
        "teacher_model": teacher,
        "criterion": config.criterion,
        "loss_balancer": config.loss_balancer,
    }
    model = mtd.convert(student, mode=[("kd_loss", mode)])
    megatron.adjust_distillation_model_for_mcore(model, config)
    model.train()
    return model


def reduce_losses(model: torch.nn.Module, lm_losses_BS: torch.Tensor) -> dict[str, torch.Tensor]:
    """Reduce the language-model losses and what the model captured to the scalars that a script logs."""
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    def mean(loss):
        losses_BS, is_partial, _ = loss
        value = losses_BS.float().mean()
        return reduce_from_tensor_model_parallel_region(value) if is_partial else value

    return model.compute_kd_loss(student_loss=lm_losses_BS.float().mean(), loss_reduction_fn=mean)


def distil_once(
    student: torch.nn.Module, teacher: torch.nn.Module, *, freeze: bool, **settings: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Do one forward and backward; return what a script logs, and the gradients of the student's trunk."""
    model = convert(student, teacher, **settings)
    handle = freeze_mtp(model) if freeze else None
    lm_losses_BS = model(**batch())
    losses = reduce_losses(model, lm_losses_BS)
    losses["kd_loss"].backward()
    if handle is not None:
        assert handle.check().num_tensors > 0
    return {"lm_loss": lm_losses_BS, **losses}, gradients(model)
