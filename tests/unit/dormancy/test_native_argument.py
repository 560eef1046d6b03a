"""Where HybridModel's forward takes `compute_mtp_loss`, as it does after 0.19, dormancy gives it as False."""

import pytest
import torch

from native_argument import hybrid_model_with_argument
from parity import assert_same, run
from tiny_models import HYBRID, HYBRID_MOE, HYBRID_TIED, build, build_pair, differing, same_bytes
from torpor import freeze_mtp


@pytest.fixture
def native(monkeypatch):
    """Make tiny models HybridModels with the argument; `class.given` lists what forward was given."""
    from megatron.core.models.hybrid import hybrid_model

    model_class = hybrid_model_with_argument()
    monkeypatch.setattr(hybrid_model, "HybridModel", model_class)
    return model_class


@pytest.mark.parametrize("inputs", [{}, {"compute_mtp_loss": True}, {"compute_mtp_loss": False}], ids=str)
@pytest.mark.parametrize("kind", [HYBRID, HYBRID_TIED, HYBRID_MOE], ids=str)
def test_parity_whatever_the_caller_gives(native, kind, inputs):
    """The caller's True, a default in some trainer, does not wake the heads."""
    dormant, reference = build_pair(kind)
    handle = freeze_mtp(dormant)
    native.given.clear()
    assert_same(dormant, reference, **inputs)
    assert native.given == [False, inputs.get("compute_mtp_loss", True)]
    handle.check()


@pytest.mark.parametrize("kind", [HYBRID, HYBRID_MOE], ids=str)
def test_both_bypasses_agree(kind, native, monkeypatch):
    """The native argument and our own bypass give the same bytes for the same model."""
    with_argument, _ = build_pair(kind)
    without_argument, _ = build_pair(kind)
    monkeypatch.undo()
    without_argument.__class__ = native.__mro__[1]
    freeze_mtp(with_argument)
    freeze_mtp(without_argument)
    output, grads = run(with_argument)
    expected, expected_grads = run(without_argument)
    assert native.given == [False]
    assert same_bytes(output, expected)
    assert differing(grads, expected_grads) == []


def test_awake_the_callers_word_counts(native):
    """Inside awake() the argument is what the caller says: dormancy adds nothing."""
    model, reference = build_pair(HYBRID)
    handle = freeze_mtp(model)
    with handle.awake():
        run(model, compute_mtp_loss=True)
        model.zero_grad()
        assert native.given == [True]
        assert_same(model, reference, compute_mtp_loss=False)


def last_stage(kind, mtp):
    """Build the stage after the first of two, in one process, and give it the hidden states of the first."""
    from megatron.core import parallel_state

    is_first = parallel_state.is_pipeline_first_stage
    parallel_state.is_pipeline_first_stage = lambda *args, **kwargs: False
    try:
        model = build(kind, mtp=mtp)
    finally:
        parallel_state.is_pipeline_first_stage = is_first
    hidden = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(4))
    hidden = hidden.to(next(model.parameters()).device).requires_grad_(True)
    model.set_input_tensor(hidden)
    return model


@pytest.mark.parametrize("argument", [True, False], ids=["native", "own-bypass"])
def test_an_unread_duplicate_gets_zeros_on_both_paths(native, argument, monkeypatch):
    """The last stage's copy of an untied embedding: DDP waits for its gradient, however MTP is skipped."""
    dormant, reference = last_stage(HYBRID, mtp=True), last_stage(HYBRID, mtp=False)
    monkeypatch.undo()
    if not argument:
        dormant.__class__ = native.__mro__[1]
    reference.load_state_dict(
        {n: t for n, t in dormant.state_dict().items() if n in reference.state_dict()}, strict=True
    )
    freeze_mtp(dormant)
    native.given.clear()
    output, grads = run(dormant)
    expected, expected_grads = run(reference)
    # The block has to be reached, since it hands out the zeros as it passes the hidden states through.
    assert native.given == ([True, True] if argument else [True])
    assert same_bytes(output, expected)
    duplicate = grads.pop("embedding.word_embeddings.weight")
    assert torch.equal(duplicate, torch.zeros_like(dormant.embedding.word_embeddings.weight))
    assert differing(grads, expected_grads) == []
