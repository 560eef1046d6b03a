"""Training on several ranks equals training on one: losses, gradient norms and every weight on every rank."""

import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks.launch import run_ranks
from torpor.megatron import parallel
from torpor.megatron.parallel import Layout

VOCABULARY, LENGTH, SAMPLES, STEPS = 64, 16, 4, 3


def build(kind: str, layout: Layout) -> torch.nn.Module:
    """A tiny model of every kind of layer, its weights a function of their names alone."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import TransformerConfig

    from torpor.megatron import specs

    config = TransformerConfig(
        num_layers=4 if kind == "hybrid" else 2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        mamba_num_heads=4,
        mamba_head_dim=8,
        mamba_num_groups=2,
        mamba_state_dim=8,
        num_moe_experts=4,
        moe_ffn_hidden_size=16,
        moe_router_topk=2,
        moe_layer_freq=[1, 0],
        moe_token_dispatcher_type="alltoall",
        mtp_num_layers=1,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        is_hybrid_model=kind == "hybrid",
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        sequence_parallel=layout.sequence_parallel,
        pipeline_dtype=torch.float32,
    )
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    if kind == "hybrid":
        pattern = "M*|E-/*E" if layout.pipeline == 2 else "M*E-/*E"
        spec = specs.hybrid_stack_spec(config)
        model = HybridModel(config, spec, VOCABULARY, LENGTH, hybrid_layer_pattern=pattern, **ends)
    else:
        model = GPTModel(
            config,
            specs.gpt_layer_spec(config),
            VOCABULARY,
            LENGTH,
            position_embedding_type="rope",
            mtp_block_spec=specs.gpt_mtp_block_spec(config),
            **ends,
        )
    for piece in sharded_pieces(model):
        generator = torch.Generator().manual_seed(zlib.crc32(piece.key.encode()))
        whole = torch.randn(piece.global_shape, generator=generator) * 0.05
        if "norm" in piece.key or piece.key.endswith((".D", "A_log")):
            whole += 1
        with torch.no_grad():
            piece.data.copy_(whole[piece.global_slice()].reshape(piece.data.shape))
    return model


def sharded_pieces(model: torch.nn.Module) -> list:
    """This rank's part of every tensor of the distributed checkpoint: where it belongs, and the live data."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    sharded = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    apply_factories(sharded)
    return [value for value in nested_values(sharded) if isinstance(value, ShardedTensor)]


def place_of(piece) -> list[int | tuple[int, int]]:
    """Where a piece lies in the whole tensor: an index for a stacked axis, a range for every other."""
    return [(at.start, at.stop) if isinstance(at, slice) else at for at in piece.global_slice()]


def train(kind: str, layout: Layout, distributed: bool) -> dict[str, Any]:
    """Train for a few steps; return losses, gradient norms and this rank's part of the weights."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from torpor.megatron.optimizer import build_optimizer

    parallel.initialize(layout, seed=11)
    bare = build(kind, layout)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    model = DistributedDataParallel(bare.config, ddp_config, bare)
    optimizer = build_optimizer(
        [model],
        lr=1e-2,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        # Large, so that rounding in a gradient near zero does not decide the sign of a whole step.
        eps=1e-3,
        clip_grad=1.0,
        distributed=distributed,
        dtype=torch.float32,
    )
    bare.config.finalize_model_grads_func = finalize_model_grads
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (STEPS, SAMPLES, LENGTH + 1), generator=generator)
    replica = parallel_state.get_data_parallel_rank()
    replicas = parallel_state.get_data_parallel_world_size()

    def forward(batches, model):
        sample = next(batches)[None]
        positions = torch.arange(LENGTH)[None]
        mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
        return model(sample[:, :-1], positions, mask, labels=sample[:, 1:]), reduce

    def reduce(output):
        loss = output.mean()
        # The schedule divides the loss in place by the number of micro-batches.
        return loss, {"loss": loss.detach().clone()}

    losses, norms = [], []
    for step in range(STEPS):
        mine = ids[step, replica::replicas]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(mine),
            model=[model],
            num_microbatches=len(mine),
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        done, norm, _ = optimizer.step()
        assert done
        total = torch.tensor([sum((float(report["loss"]) for report in reports), 0.0)])
        # Only the last stage has losses, the same on each of its tensor parallel ranks.
        dist.all_reduce(total)
        losses.append(float(total) / layout.tensor / SAMPLES)
        norms.append(float(norm))
    weights = [(piece.key, place_of(piece), piece.data.detach().clone()) for piece in sharded_pieces(bare)]
    parallel.shutdown()
    return {"losses": losses, "norms": norms, "weights": weights}


def train_all(cases: list[tuple[str, Layout, bool]]) -> list[dict[str, Any]]:
    return [train(*case) for case in cases]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """Both kinds of models trained on one rank."""
    kinds = ["hybrid", "gpt"]
    results = run_ranks(train_all, 1, [(kind, Layout(), False) for kind in kinds])[0]
    return dict(zip(kinds, results, strict=True))


def assert_same_training(results: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Compare each rank's numbers and its part of each weight with those of one rank."""
    # On one rank a tensor is whole, but for stacked axes: each expert is a piece of its own.
    whole = {
        (key, *(at for at in place if isinstance(at, int))): data for key, place, data in wanted["weights"]
    }
    for result in results:
        assert result["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
        assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
        for key, place, data in result["weights"]:
            reference = whole[key, *(at for at in place if isinstance(at, int))]
            part = reference[tuple(slice(*at) for at in place if isinstance(at, tuple))]
            torch.testing.assert_close(
                data, part, rtol=0, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}"
            )
    covered = {key for result in results for key, _, _ in result["weights"]}
    assert covered == {key for key, _, _ in wanted["weights"]}


TWO_RANKS = [
    (kind, layout, distributed)
    for kind in ("hybrid", "gpt")
    for layout, distributed in (
        (Layout(tensor=2, sequence_parallel=True), False),
        (Layout(pipeline=2), False),
        (Layout(expert=2), True),
        (Layout(), True),
        (Layout(), False),
    )
]
FOUR_RANKS = [
    ("hybrid", Layout(tensor=2, pipeline=2, sequence_parallel=True), True),
    ("hybrid", Layout(pipeline=2, expert=2), True),
    ("gpt", Layout(tensor=2, expert=2, sequence_parallel=True), True),
]


@pytest.mark.parametrize(("world_size", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)], ids=["2", "4"])
def test_every_layout_trains_like_one_rank(alone, world_size: int, cases: list) -> None:
    by_rank = run_ranks(train_all, world_size, cases, timeout=400)
    for index, (kind, _, _) in enumerate(cases):
        assert_same_training([results[index] for results in by_rank], alone[kind])


def test_training_on_one_rank_learns(alone) -> None:
    """The numbers that the layouts are compared with move: three steps on fresh random tokens."""
    for result in alone.values():
        assert len(set(result["losses"])) == STEPS
        assert all(3.5 < loss < 5 for loss in result["losses"])  # ln 64 = 4.16
        assert all(norm > 0.1 for norm in result["norms"])


@pytest.mark.parametrize("change", [1e-4, float("nan")])
def test_the_comparison_sees_one_wrong_element(alone, change: float) -> None:
    wanted = alone["gpt"]
    key, place, data = wanted["weights"][0]
    wrong = data.clone()
    wrong.view(-1)[3] += change
    with pytest.raises(AssertionError, match=key):
        assert_same_training([wanted | {"weights": [(key, place, wrong), *wanted["weights"][1:]]}], wanted)


def initialize_with_errors() -> list[str]:
    """The messages of layouts that two ranks cannot have."""
    messages = []
    for layout in (Layout(tensor=3), Layout(tensor=2, pipeline=2), Layout(expert=4)):
        try:
            parallel.initialize(layout, seed=1)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def draw(layout: Layout) -> tuple[list[float], list[float]]:
    """Numbers drawn outside and inside the state of tensor parallel ranks."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    parallel.initialize(layout, seed=1)
    outside = torch.randn(3).tolist()
    with get_cuda_rng_tracker().fork():
        inside = torch.randn(3).tolist()
    parallel.shutdown()
    return outside, inside


def exchange_unequal_parts() -> tuple[list[list[float]], list[float]]:
    """Gather one number from rank 0 and two from rank 1; give the sums of three to them in the same way."""
    rank = dist.get_rank()
    space = {
        "__name__": "megatron.core.tensor_parallel.mappings",  # gloo's own collectives refuse unequal parts
        "dist": dist,
        "gathered": [torch.zeros(1), torch.zeros(2)],
        "mine": torch.full((rank + 1,), float(rank + 1)),
        "scattered": torch.zeros(rank + 1),
        "whole": [torch.tensor([1.0]), torch.tensor([2.0, 3.0])],
    }
    exec("dist.all_gather(gathered, mine); dist.reduce_scatter(scattered, whole)", space)
    return [part.tolist() for part in space["gathered"]], space["scattered"].tolist()


def check_two_ranks() -> tuple:
    return (
        initialize_with_errors(),
        draw(Layout(tensor=2)),
        draw(Layout(pipeline=2)),
        draw(Layout()),
        exchange_unequal_parts(),
    )


@pytest.fixture(scope="module")
def two_ranks() -> list[tuple]:
    return list(zip(*run_ranks(check_two_ranks, 2), strict=True))


def test_every_rank_refuses_a_layout_with_the_same_words(two_ranks) -> None:
    first, second = two_ranks[0]
    assert first == second
    assert len(first) == 3
    assert all(message.startswith("ConfigError: 2 ranks cannot be divided") for message in first)


def test_ranks_draw_alike_where_they_must_and_differently_where_they_must(two_ranks) -> None:
    """Replicas draw alike; tensor parallel ranks differ inside their own state only; stages always differ."""
    _, tensor, pipeline, data, _ = two_ranks
    assert data[0] == data[1]
    assert tensor[0][0] == tensor[1][0]
    assert tensor[0][1] != tensor[1][1]
    assert pipeline[0][0] != pipeline[1][0]
    assert pipeline[0][1] != pipeline[1][1]


def test_parts_of_unequal_size_are_gathered_and_scattered(two_ranks) -> None:
    (gathered, first), (gathered_too, second) = two_ranks[4]
    assert gathered == gathered_too == [[1.0], [2.0, 2.0]]
    assert first == [2.0]
    assert second == [4.0, 6.0]
