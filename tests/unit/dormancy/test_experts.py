"""What MoE layers keep on the side: expert biases, metrics and recorded routes, with those of MTP asleep."""

import pytest
import torch

from parity import run
from tiny_models import GPT_MOE, HYBRID_MOE, build, build_pair, differing, same_bytes
from torpor import freeze_mtp

KINDS = pytest.mark.parametrize("kind", [GPT_MOE, HYBRID_MOE], ids=str)


@pytest.fixture(autouse=True)
def recorders():
    """Megatron lists the recorders of all models of a process."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()
    yield RouterReplay.global_router_replay_instances
    RouterReplay.clear_global_router_replay_instances()


@KINDS
def test_balancing_moves_the_trunks_biases_only(kind):
    """The bias moves outside autograd, by the tokens that each expert got: MTP's got none."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    def biases_after_a_step(model):
        before = {n: b.clone() for n, b in model.named_buffers() if n.endswith("expert_bias")}
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        run(ddp)
        finalize_model_grads([ddp])
        after = {n: b for n, b in model.named_buffers() if n.endswith("expert_bias")}
        return after, differing(before, after)

    dormant, reference = build_pair(kind, moe_router_bias_update_rate=0.01)
    handle = freeze_mtp(dormant)
    biases, moved = biases_after_a_step(dormant)
    expected, expected_moved = biases_after_a_step(reference)
    assert moved == expected_moved != []
    assert all(same_bytes(biases[name], bias) for name, bias in expected.items())
    handle.check()


@KINDS
def test_auxiliary_losses_and_their_report(kind):
    """The loss itself, its gradients and the logged mean are those of the model without MTP."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    settings = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.01,
    }

    def step(model):
        tracker = get_moe_metrics_tracker()
        tracker.clear()
        output, grads = run(model)
        values = {name: entry.values.clone() for name, entry in tracker.metrics.items()}
        counted = tracker._count_moe_layers(
            model.config.num_layers, model.config.moe_layer_freq, model.config.mtp_num_layers
        )
        tracker.clear()
        return output, grads, {n: v.sum() for n, v in values.items()}, counted

    dormant, reference = build_pair(kind, **settings)
    handle = freeze_mtp(dormant)
    output, grads, losses, counted = step(dormant)
    handle.remove()
    expected, expected_grads, expected_losses, expected_counted = step(reference)
    assert same_bytes(output, expected)
    assert differing(grads, expected_grads) == []
    assert losses
    assert differing(losses, expected_losses) == []
    assert counted == expected_counted


@KINDS
def test_mtps_routers_record_no_routes(kind, recorders):
    """One recording for each layer that ran, as without MTP, and replay takes as many."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    dormant = build(kind, moe_enable_routing_replay=True)
    of_dormant = list(recorders)
    recorders.clear()
    _, reference = build_pair(kind, moe_enable_routing_replay=True)
    of_reference = recorders[len(of_dormant) :]
    recorders[:] = of_dormant
    handle = freeze_mtp(dormant)
    assert len(recorders) == len(of_reference) < len(of_dormant)

    def record(model, instances):
        recorders[:] = instances
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        run(model)
        return RouterReplay.get_recorded_data()

    of_trunk = list(recorders)
    expected = record(reference, of_reference)
    routes = record(dormant, of_trunk)
    assert len(routes) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(routes, expected, strict=True))

    other = [(route + 1) % 4 for route in routes]
    RouterReplay.set_replay_data(other)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    output, _ = run(dormant)
    recorders[:] = of_reference
    RouterReplay.set_replay_data(other)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    assert same_bytes(output, run(reference)[0])

    recorders[:] = of_trunk
    handle.remove()
    assert recorders == of_dormant


def test_recorders_of_other_models_may_come_and_go_meanwhile(recorders):
    """Each comes back behind those that stood before it and are still there."""
    first = build(HYBRID_MOE, moe_enable_routing_replay=True)
    ours = list(recorders)
    handle = freeze_mtp(first)
    second = build(HYBRID_MOE, seed=2, moe_enable_routing_replay=True)
    theirs = recorders[-3:]
    other_handle = freeze_mtp(second)
    handle.remove()
    assert recorders == [*ours, theirs[0]]
    other_handle.remove()
    assert recorders == [*ours, *theirs]
