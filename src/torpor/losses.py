"""Distillation losses that never hold all logits, for any training loop. See `torpor.training.losses`.

    from torpor.losses import LossSettings, OutputProjection, distillation_loss

    student = OutputProjection(hidden_states_SBH, lm_head_weight_VH)
    teacher = OutputProjection(teacher_hidden_states_SBH, teacher_lm_head_weight_VH)
    result = distillation_loss(student, teacher, LossSettings(temperature=2.0), loss_mask_BS=mask_BS)
    result.loss.backward()

`hand_over_projection` takes both from a forward of a Megatron-Core model.
"""

from torpor.megatron.hidden_states import OutputProjection, hand_over_projection
from torpor.training.losses import DistillationLoss, LossSettings, TopTokens, distillation_loss

__all__ = [
    "DistillationLoss",
    "LossSettings",
    "OutputProjection",
    "TopTokens",
    "distillation_loss",
    "hand_over_projection",
]
