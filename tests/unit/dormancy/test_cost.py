"""A dormant step does what a step of the model without MTP does, operator by operator, and nothing else."""

from collections import Counter

import pytest
import torch

from parity import FULL_RECOMPUTE
from profiles import operators
from tiny_models import GPT, GPT_MOE, GPT_TIED, HYBRID, HYBRID_MOE, build, build_pair
from torpor import freeze_mtp

# One scalar zero is made, and one tensor of the gradient's size written from it.
MAKING_ZEROS = {
    # Forward: the hidden states under another tensor object.
    "_WithZeroGradients": 1,
    "aten::new_empty": 1,
    "aten::_has_compatible_shallow_copy_type": 1,
    # Backward: one zero, expanded to the parameter's shape and accumulated.
    "autograd::engine::evaluate_function: _WithZeroGradientsBackward": 1,
    "_WithZeroGradientsBackward": 1,
    "aten::zeros": 1,
    "aten::zero_": 1,
    "aten::empty": 2,
    "aten::expand": 1,
    "aten::as_strided": 1,
    "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad": 1,
    "torch::autograd::AccumulateGrad": 1,
    "aten::new_empty_strided": 1,
    "aten::empty_strided": 1,
    "aten::copy_": 1,
}


@pytest.mark.parametrize("recompute", [{}, FULL_RECOMPUTE], ids=["no-recompute", "full-recompute"])
@pytest.mark.parametrize("kind", [GPT, GPT_TIED, GPT_MOE, HYBRID, HYBRID_MOE], ids=str)
def test_the_same_operators_in_the_same_order(kind, recompute):
    """Forward and backward; awake, there are many more."""
    dormant, reference = build_pair(kind, **recompute)
    awake = operators(dormant)
    freeze_mtp(dormant)
    expected = operators(reference)
    assert operators(dormant) == expected
    assert len(awake) > len(expected) > 100


@pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
def test_a_stage_with_an_unread_duplicate_makes_zeros_and_nothing_else(kind, monkeypatch):
    """DDP waits for that gradient: one identity in forward, one tensor of zeros a parameter in backward."""
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "is_pipeline_first_stage", lambda *args, **kwargs: False)
    dormant, reference = build(kind, mtp=True), build(kind, mtp=False)
    for model in (dormant, reference):
        hidden = torch.randn(16, 2, 32, device=next(model.parameters()).device)
        model.set_input_tensor(hidden.requires_grad_(True))
    freeze_mtp(dormant)
    extra = Counter(operators(dormant))
    extra.subtract(operators(reference))
    assert {name: count for name, count in extra.items() if count} == MAKING_ZEROS
