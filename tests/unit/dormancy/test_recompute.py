"""Activation recompute of the trunk with dormant MTP: the same bytes, and no MTP module in backward either.

Retained modules refuse to run while asleep, so every backward here proves that MTP was not recomputed.
"""

import pytest

from parity import assert_parity, run
from tiny_models import GPT, GPT_MOE, GPT_TWO_DEPTHS, HYBRID, HYBRID_MOE, batch, build
from torpor import MTPExecutedError, freeze_mtp

FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}


@pytest.mark.parametrize("method", ["uniform", "block"])
@pytest.mark.parametrize("kind", [GPT_TWO_DEPTHS, GPT_MOE, HYBRID_MOE], ids=str)
def test_full(kind, method):
    """`block` recomputes the first layers only; upstream it skips MTP with a warning when heads run."""
    assert_parity(kind, recompute_method=method, **FULL)


# "layernorm" raises a NameError in Megatron-Core 0.19 without Transformer Engine (tensor_parallel/random.py,
# FP8GlobalStateManager), with and without MTP; "moe_act" needs grouped GEMM and "mla_up_proj" MLA.
@pytest.mark.parametrize("module", ["core_attn", "mlp", "moe", "shared_experts"])
@pytest.mark.parametrize("kind", [GPT, GPT_MOE, HYBRID, HYBRID_MOE], ids=str)
def test_selective_by_module(kind, module):
    """Each module that upstream recomputes by name."""
    assert_parity(kind, recompute_granularity="selective", recompute_modules=[module])


def test_an_awake_graph_is_not_recomputed_asleep():
    """A backward with recompute has to be inside awake() like its forward: it runs the heads again."""
    model = build(GPT, recompute_method="uniform", **FULL)
    handle = freeze_mtp(model)
    with handle.awake():
        output = model(**batch())
    with pytest.raises(MTPExecutedError, match="called outside inference"):
        output.sum().backward()
    other = build(GPT, recompute_method="uniform", **FULL)
    handle = freeze_mtp(other)
    with handle.awake():
        run(other)
    handle.check()
