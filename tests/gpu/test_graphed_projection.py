"""A teacher's forward from a CUDA graph: what it is recorded for, and that it is the forward that it was."""

from types import MethodType

import pytest
import torch

from tiny_models import GPT, GPT_MOE, HYBRID, HYBRID_MOE, batch, build, same_bytes
from torpor.megatron.graphed_projection import GraphedProjection, can_be_recorded
from torpor.megatron.hidden_states import hand_over_projection

pytestmark = pytest.mark.usefixtures("megatron_rank")


def build_teacher(kind):
    return build(kind, mtp=False).requires_grad_(False)


def inputs(seed, size=2):
    values = batch(seed, size)
    return values["input_ids"], values["position_ids"], values["labels"]


def expected(model, tokens_BS, positions_BS, labels_BS):
    model.eval()
    with torch.no_grad(), hand_over_projection(model) as handover:
        model(tokens_BS, positions_BS, None, labels=labels_BS)
    return handover.take().hidden_states_SBH


@pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
def test_replays_are_the_forward(kind):
    model = build_teacher(kind)
    assert can_be_recorded(model)
    graphed = GraphedProjection(model)
    for seed in range(6):
        projection = graphed.run(*inputs(seed))
        assert same_bytes(projection.hidden_states_SBH, expected(model, *inputs(seed)))
        assert not projection.hidden_states_SBH.requires_grad
    assert graphed.is_recorded


def test_other_shapes_run_as_ever():
    model = build_teacher(GPT)
    graphed = GraphedProjection(model)
    for seed in range(4):
        graphed.run(*inputs(seed))
    for size in (1, 2, 3):
        ours = graphed.run(*inputs(9, size)).hidden_states_SBH
        assert same_bytes(ours, expected(model, *inputs(9, size)))


def test_a_forward_that_waits_for_the_device_stays_as_it_was():
    model = build_teacher(GPT)
    forward = model.decoder.forward

    def waits(self, *args, **kwargs):
        output = forward(*args, **kwargs)
        output.sum().item()
        return output

    model.decoder.forward = MethodType(waits, model.decoder)
    graphed = GraphedProjection(model)
    stream = torch.cuda.current_stream()
    for seed in range(6):
        ours = graphed.run(*inputs(seed)).hidden_states_SBH
        assert same_bytes(ours, expected(model, *inputs(seed)))
    assert not graphed.is_recorded
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.rand(2, device="cuda").isfinite().all(), "the generator is in use"


@pytest.mark.parametrize("kind", [GPT_MOE, HYBRID_MOE], ids=str)
def test_experts_are_not_recorded(kind):
    assert not can_be_recorded(build_teacher(kind))


def test_megatrons_own_attention_reads_the_generator_and_stays_as_it_was(monkeypatch):
    from megatron.core.transformer.enums import AttnBackend

    # Megatron sets these for a model's attention, and refuses a second model of the process with another.
    for kernels in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.delenv(f"NVTE_{kernels}_ATTN", raising=False)
    local = {"transformer_impl": "local", "attention_backend": AttnBackend.local}
    model = build(GPT, mtp=False, **local).requires_grad_(False)
    graphed = GraphedProjection(model)
    for seed in range(4):
        ours = graphed.run(*inputs(seed)).hidden_states_SBH
        assert same_bytes(ours, expected(model, *inputs(seed)))
    assert not graphed.is_recorded
    assert torch.rand(2, device="cuda").isfinite().all()
