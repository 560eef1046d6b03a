"""Routes that a rollout took, replayed in training: MTP's routers neither record nor consume one."""

import pytest
import torch

from parity import FULL_RECOMPUTE
from tiny_models import (
    GPT_MOE,
    HYBRID_MOE,
    SEQUENCE,
    VOCAB,
    build,
    build_pair,
    differing,
    gradients,
    same_bytes,
)
from torpor import freeze_mtp, policy

KINDS = pytest.mark.parametrize("kind", [GPT_MOE, HYBRID_MOE], ids=str)
TOKENS = torch.randint(0, VOCAB, (4, SEQUENCE), generator=torch.Generator().manual_seed(3)).split(2)
TOP_K, EXPERTS = 2, 4


@pytest.fixture(autouse=True)
def recorders(megatron_rank):
    """Megatron lists the recorders of all models of a process, in the order in which they were built."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()
    yield RouterReplay.global_router_replay_instances
    RouterReplay.clear_global_router_replay_instances()


@pytest.fixture
def pair(recorders):
    """Build a dormant model, the same without heads, and the recorders of each."""

    def build_them(kind, **overrides):
        dormant, reference = build_pair(kind, moe_enable_routing_replay=True, **overrides)
        handle = freeze_mtp(dormant)
        of_mtp, of_reference = recorders_of(dormant.mtp), recorders_of(reference)
        of_trunk = [recorder for recorder in recorders if recorder not in of_reference]
        assert of_mtp
        assert len(of_trunk) == len(of_reference)
        return dormant, reference, handle, of_trunk, of_reference, of_mtp

    return build_them


def recorders_of(model):
    return [m.router_replay for m in model.modules() if getattr(m, "router_replay", None) is not None]


def record(model, tokens):
    """Do what a rollout does: run the model, and keep which experts each token went to in each layer."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    policy.compute_log_probs(model, tokens)
    routes = RouterReplay.get_recorded_data()
    RouterReplay.clear_global_router_replay_action()
    return routes


def train(model, routes_of_batches):
    """Replay the routes of each micro-batch in its forward, and in what backward computes again."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    model.zero_grad()
    losses, outputs = [], []
    # Forwards first and backwards afterwards, in the same order, as a pipeline does.
    for tokens, routes in zip(TOKENS, routes_of_batches, strict=True):
        if routes is not None:
            RouterReplay.set_replay_data(routes)
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        values = policy.forward(model, tokens)
        if routes is not None:
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        outputs.append(values["log_probs"].detach())
        losses.append((values["log_probs"] * torch.linspace(-1, 1, tokens.numel()).view_as(tokens)).sum())
    for loss in losses:
        loss.backward()
    RouterReplay.clear_global_router_replay_action()
    RouterReplay.clear_global_indices()
    return torch.stack(outputs), gradients(model)


def other_routes(routes):
    """Routes that the model itself would not take."""
    return [(route + 1) % EXPERTS for route in routes]


@pytest.mark.parametrize("recompute", [{}, FULL_RECOMPUTE], ids=["no-recompute", "full-recompute"])
@KINDS
def test_a_rollouts_routes_in_training(kind, recompute, pair, recorders):
    """Recorded and replayed, values and gradients are those of the model without heads, byte for byte."""
    dormant, reference, handle, of_trunk, of_reference, of_mtp = pair(kind, **recompute)
    recorders[:] = of_trunk
    routes = [record(dormant, tokens) for tokens in TOKENS]
    recorders[:] = of_reference
    expected_routes = [record(reference, tokens) for tokens in TOKENS]
    for found, expected in zip(routes, expected_routes, strict=True):
        assert len(found) == len(expected) == len(of_trunk)
        assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))
        assert found[0].shape == (2 * SEQUENCE, TOP_K)

    # By the time it is trained on, the policy would take other routes.
    replayed = [other_routes(each) for each in routes]
    recorders[:] = of_trunk
    log_probs, grads = train(dormant, replayed)
    recorders[:] = of_reference
    expected_log_probs, expected_grads = train(reference, replayed)
    assert same_bytes(log_probs, expected_log_probs)
    assert differing(grads, expected_grads) == []

    own_log_probs, _ = train(reference, [None, None])
    assert (log_probs - own_log_probs).abs().max() > 1e-3
    for recorder in of_mtp:
        assert recorder.recorded_topk_idx is None
        assert recorder.target_topk_idx is None
        assert recorder.replay_backward_list == []
    handle.check()


@KINDS
def test_recomputing_with_routes_of_another_batch_is_noticed(kind, pair, recorders):
    """The comparison above can fail: gradients follow the routes that backward computes with."""
    dormant, _, _, of_trunk, _, _ = pair(kind, **FULL_RECOMPUTE)
    recorders[:] = of_trunk
    first, second = ([each, other_routes(each)] for each in (record(dormant, tokens) for tokens in TOKENS))
    _, right = train(dormant, [first[0], second[0]])
    right = {name: grad.clone() for name, grad in right.items()}
    for recorder in of_trunk:
        recorder.set_target_indices = lambda routes, r=recorder: (
            setattr(r, "target_topk_idx", routes) or r.replay_backward_list.append((routes + 1) % EXPERTS)
        )
    _, wrong = train(dormant, [first[0], second[0]])
    assert differing(right, wrong)


@KINDS
def test_with_the_heads_awake_lengths_disagree(kind, recorders):
    """What dormancy is for here: routes of the trunk's layers do not fit a list with MTP's routers in it."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    model = build(kind, moe_enable_routing_replay=True)
    handle = freeze_mtp(model)
    routes = record(model, TOKENS[0])
    RouterReplay.set_replay_data(routes)
    handle.remove()
    with pytest.raises(ValueError, match=rf"replay tensors \({len(routes)}\) does not match"):
        RouterReplay.set_replay_data(routes)


@KINDS
def test_a_rollout_that_drafts_with_the_heads(kind, recorders):
    """In inference the heads run, with routers of their own: the trunk's records stay the trunk's."""
    from megatron.core.inference.utils import InferenceMode
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    model = build(kind, moe_enable_routing_replay=True)
    handle = freeze_mtp(model)
    model.eval()
    # As Megatron's inference keeps them: one buffer [tokens, layers, k] for all layers.
    buffer = torch.full((2 * SEQUENCE, len(recorders), TOP_K), -1)
    RouterReplay.set_global_static_buffers(buffer)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    tokens = TOKENS[0]
    positions = torch.arange(SEQUENCE).expand_as(tokens)
    hidden = torch.randn(SEQUENCE, 1, 32, generator=torch.Generator().manual_seed(0))
    drafts = []
    for module in model.mtp.modules():
        if getattr(module, "router_replay", None) is not None:
            module.register_forward_hook(lambda *_: drafts.append(1))
    with InferenceMode.active(), torch.no_grad():
        model(tokens, positions, None, runtime_gather_output=True)
        routes = buffer.clone()
        model.compute_mtp_single_step(
            hidden_states=hidden, next_token_ids=tokens[:1], position_ids=positions[:1], depth=0
        )
    assert routes.min() >= 0
    assert torch.equal(buffer, routes)
    RouterReplay.clear_global_static_buffers()
    assert [torch.equal(routes[:, i], route) for i, route in enumerate(record(model, tokens))] == [
        True
    ] * len(recorders)
    assert drafts
    handle.check()
