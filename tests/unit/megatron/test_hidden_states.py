"""A forward that ends before the projection: what it hands over makes the logits; it leaves no trace."""

import pytest
import torch

from tiny_models import (
    GPT,
    GPT_MOE,
    GPT_TIED,
    GPT_TWO_DEPTHS,
    HYBRID,
    HYBRID_MOE,
    HYBRID_TIED,
    batch,
    build,
    gradients,
    same_bytes,
)
from torpor import TorporError, UnsupportedModelError, freeze_mtp
from torpor.megatron.hidden_states import find_language_model, hand_over_projection

pytestmark = pytest.mark.usefixtures("megatron_rank")
KINDS = [GPT, GPT_TIED, GPT_MOE, GPT_TWO_DEPTHS, HYBRID, HYBRID_TIED, HYBRID_MOE]


def logits_from(projection):
    return torch.nn.functional.linear(projection.hidden_states_SBH, projection.weight_VH).transpose(0, 1)


def snapshot(model):
    return {name: dict(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("heads", ["none", "asleep", "awake"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_projecting_what_is_handed_over_gives_the_logits(kind, heads):
    model = build(kind, mtp=heads != "none")
    if heads == "asleep":
        freeze_mtp(model)
    inputs = batch()
    before = snapshot(model)
    with torch.no_grad():
        model.eval()
        expected = model(**(inputs | {"labels": None}))
        model.train()
        with hand_over_projection(model) as handover:
            model(**inputs)
    assert same_bytes(logits_from(handover.take()).contiguous(), expected)
    assert snapshot(model) == before


@pytest.mark.parametrize("heads", ["asleep", "awake"])
@pytest.mark.parametrize("kind", [GPT_TIED, HYBRID_MOE], ids=str)
def test_gradients_of_the_handed_over_are_those_of_the_whole_forward(kind, heads):
    def grads(hand_over):
        model = build(kind)
        if heads == "asleep":
            freeze_mtp(model)
        inputs = batch()
        if hand_over:
            with hand_over_projection(model) as handover:
                model(**inputs)
            logits = logits_from(handover.take())
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), inputs["labels"].flatten(), reduction="none"
            )
        else:
            loss = model(**inputs)
        loss.mean().backward()
        return gradients(model)

    left, right = grads(True), grads(False)
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_balancing_losses_of_experts_reach_the_gradients(recompute):
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

    def grads(coefficient, *, hand_over):
        model = build(
            GPT_MOE,
            moe_router_load_balancing_type="aux_loss",
            moe_router_enable_expert_bias=False,
            moe_aux_loss_coeff=coefficient,
            **(full if recompute else {}),
        )
        freeze_mtp(model)
        inputs = batch()
        if not hand_over:
            model(**inputs).mean().backward()
            return gradients(model)
        with hand_over_projection(model) as handover:
            model(**inputs)
        logits = logits_from(handover.take()).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, inputs["labels"].flatten()).backward()
        return gradients(model)

    def agree(left, right):
        return all(torch.allclose(left[name], right[name], rtol=1e-4, atol=1e-6) for name in left)

    whole, ours = grads(0.1, hand_over=False), grads(0.1, hand_over=True)
    assert whole.keys() == ours.keys()
    assert agree(whole, ours)
    assert not agree(ours, grads(0.0, hand_over=True))  # the comparison can fail


def test_a_tied_model_hands_over_its_embedding_and_gets_the_gradient_there():
    model = build(GPT_TIED, mtp=False)
    with hand_over_projection(model) as handover:
        model(**batch())
    assert handover.take().weight_VH is model.embedding.word_embeddings.weight


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["embedding", "decoder", "output_layer"])
@pytest.mark.parametrize("heads", ["asleep", "awake"])
def test_an_exception_leaves_no_trace(error, place, heads):
    model = build(HYBRID)
    if heads == "asleep":
        freeze_mtp(model)
    model.compute_language_model_loss = own = model.compute_language_model_loss  # as Model-Optimizer does

    def fail(*_):
        raise error

    hook = getattr(model, place).register_forward_pre_hook(fail)
    before = snapshot(model)
    with pytest.raises(error), hand_over_projection(model):
        model(**batch())
    assert snapshot(model) == before
    assert vars(model)["compute_language_model_loss"] is own
    hook.remove()


def test_wrappers_are_looked_through_and_the_type_is_kept():
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    model = build(GPT, params_dtype=torch.bfloat16)
    freeze_mtp(model)
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(), Float16Module(model.config, model)
    )
    assert find_language_model(wrapped) is model
    with hand_over_projection(wrapped) as handover:
        wrapped(**batch())
    assert handover.take().hidden_states_SBH.dtype == torch.bfloat16


def test_hooks_of_the_output_layer_still_run():
    # DDP waits for gathered weights in one.
    model = build(GPT, mtp=False)
    called = []
    model.output_layer.register_forward_pre_hook(lambda *_: called.append(True))
    with hand_over_projection(model) as handover:
        model(**batch())
    assert handover.take()
    assert called == [True]


def test_mup_scaled_logits():
    model = build(GPT, mtp=False, use_mup=True, mup_base_hidden_size=16)
    assert model.config.mup_output_mult != 1.0
    inputs = batch()
    with torch.no_grad():
        expected = model(**(inputs | {"labels": None}))
        with hand_over_projection(model) as handover:
            model(**inputs)
    torch.testing.assert_close(logits_from(handover.take()), expected)


class TestRefusals:
    def test_two_forwards_in_one_block(self):
        model = build(GPT, mtp=False)
        with hand_over_projection(model):
            model(**batch())
            with pytest.raises(TorporError, match="called twice"):
                model(**batch())

    def test_taking_without_a_forward(self):
        model = build(GPT, mtp=False)
        with hand_over_projection(model) as handover:
            pass
        with pytest.raises(TorporError, match="handed over no hidden states"):
            handover.take()

    def test_an_mtp_call_that_is_missing_is_not_taken_for_the_main_one(self, monkeypatch):
        """Sabotage: MTP projects once less than its depth, so the main call is taken for MTP's."""
        from torpor.megatron import hidden_states

        model = build(GPT)
        monkeypatch.setattr(hidden_states, "_mtp_projections", lambda _: 2)
        with hand_over_projection(model) as handover:
            model(**batch())
        with pytest.raises(TorporError, match="2 times for MTP"):
            handover.take()

    def test_quantized_output_layers(self):
        model = build(GPT, mtp=False)
        model.output_layer.weight_quantizer = torch.nn.Identity()
        model.output_layer.weight_quantizer.is_enabled = True
        with pytest.raises(UnsupportedModelError, match="weight_quantizer"), hand_over_projection(model):
            pass
        model.output_layer.weight_quantizer.is_enabled = False
        with hand_over_projection(model) as handover:
            model(**batch())
        assert handover.take()

    def test_adapters_on_the_output_layer(self):
        model = build(GPT, mtp=False)
        model.output_layer = torch.nn.Sequential(model.output_layer)
        with pytest.raises(UnsupportedModelError, match="Sequential"), hand_over_projection(model):
            pass

    def test_other_models(self):
        with pytest.raises(UnsupportedModelError, match="Linear is no GPTModel"):
            find_language_model(torch.nn.Linear(1, 1))
