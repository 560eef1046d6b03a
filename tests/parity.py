"""Comparing a dormant model, bit for bit, with one that was built without MTP from the same trunk."""

import torch

from tiny_models import batch, build_pair, differing, gradients, same_bytes
from torpor import freeze_mtp

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def run(model, **inputs):
    """Do one forward and backward with distinct gradients for every output; return output and gradients."""
    output = model(**batch() | inputs)
    weights = torch.linspace(0.5, 1.5, output.numel(), device=output.device).view_as(output)
    (output.float() * weights).sum().backward()
    return output, gradients(model)


def assert_same(dormant, reference, **inputs):
    """Assert that outputs and all gradients of two models are the same bytes, and that there are some."""
    output, grads = run(dormant, **inputs)
    expected, expected_grads = run(reference, **inputs)
    assert same_bytes(output, expected)
    assert expected_grads
    assert differing(grads, expected_grads) == []


def assert_parity(kind, *, inputs=None, **overrides):
    """Build a pair, freeze the one with MTP, compare them, and check the proof; return the dormant model."""
    dormant, reference = build_pair(kind, **overrides)
    handle = freeze_mtp(dormant)
    assert_same(dormant, reference, **(inputs or {}))
    assert handle.check().num_tensors > 0
    return dormant
