"""Dormancy on several ranks: every stage and rank of a layout equals the same layout built without MTP."""

import copy
from functools import partial

import pytest
import torch

from ranks.launch import run_ranks
from tiny_models import (
    GPT,
    GPT_MOE,
    GPT_TIED,
    HYBRID,
    HYBRID_MOE,
    HYBRID_TIED,
    Kind,
    batch,
    build_pair,
    differing,
)
from torpor import freeze_mtp

STEPS, MICROBATCHES = 3, 2


def train(model, *, distributed_optimizer=False):
    """Three steps with Megatron's schedule, DDP and optimizer; returns all that must be equal."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from torpor.megatron.optimizer import build_optimizer

    config = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer)
    ddp = DistributedDataParallel(model.config, config, model)
    optimizer = build_optimizer(
        [ddp],
        lr=1e-2,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        clip_grad=1.0,
        distributed=distributed_optimizer,
        dtype=torch.float32,
    )
    losses, grad_norms, grads = [], [], {}

    def loss_of(output):
        losses.append(output.detach().clone())
        return output.float().mean(), {"loss": output.detach().float().mean()}

    def forward_step(iterator, model):
        return model(**next(iterator)), loss_of

    for step in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch(seed=10 * step + i) for i in range(MICROBATCHES)]),
            model=[ddp],
            num_microbatches=MICROBATCHES,
            seq_length=16,
            micro_batch_size=2,
            forward_only=False,
        )
        finalize_model_grads([ddp])
        if step == 0:
            grads = {n: p.main_grad.clone() for n, p in model.named_parameters() if hasattr(p, "main_grad")}
        _, grad_norm, _ = optimizer.step()
        grad_norms.append(grad_norm)
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if not n.startswith("mtp.")}
    return {"losses": losses, "grad_norms": grad_norms, "grads": grads, "weights": weights}, optimizer


def compare(got, expected, kind):
    """Name everything in which a dormant run differs from the run built without MTP."""
    wrong = []
    for index, (a, b) in enumerate(zip(got["losses"], expected["losses"], strict=True)):
        if not torch.equal(a, b):
            wrong.append(f"loss {index}: {(a - b).abs().max():.3g}")
    wrong += [f"grad norms {got['grad_norms']} {expected['grad_norms']}"] * (
        got["grad_norms"] != expected["grad_norms"]
    )
    for what in ("grads", "weights"):
        tensors = dict(got[what])
        # The MTP stage's own copies: of the embedding, whether it projects with it (tied) or nothing does.
        duplicate = tensors.pop("embedding.word_embeddings.weight", None)
        reference = dict(expected[what])
        embedding = reference.pop("embedding.word_embeddings.weight", None)
        if kind.tied and embedding is None:
            # Last stage: the reference projects with its `output_layer.weight`, ours with the duplicate.
            tensors.pop("output_layer.weight", None)
            embedding = reference.pop("output_layer.weight", None)
        if embedding is not None and not torch.equal(duplicate, embedding):
            wrong.append(f"{what} of the embedding: {(duplicate - embedding).abs().max():.3g}")
        wrong += [f"{what} of {name}" for name in differing(tensors, reference)]
    return wrong


def embedding_copies_differ(model):
    """Whether the ranks that hold the embedding (the first stage, and the MTP stage's duplicate) disagree."""
    weight = model.embedding.word_embeddings.weight.detach()
    copies = [torch.empty_like(weight) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(copies, weight)
    return not all(torch.equal(copies[0], other) for other in copies)


def check_pipeline(kind: Kind):
    """On two pipeline stages."""
    from torpor.megatron.parallel import Layout, initialize

    initialize(Layout(pipeline=2), seed=1)
    dormant, reference = build_pair(kind)
    handle = freeze_mtp(dormant)
    got, optimizer = train(dormant)
    expected, _ = train(reference)
    wrong = compare(got, expected, kind)
    wrong += ["the embedding's copies"] * embedding_copies_differ(dormant)
    handle.check(optimizer)
    return wrong


def check_flipping_mtp_process(kind: Kind):
    """The public half measure: `mtp_process` off and a config copy, during forward."""
    from torpor.megatron.parallel import Layout, initialize

    initialize(Layout(pipeline=2), seed=1)
    flipped, reference = build_pair(kind)
    for name, parameter in flipped.named_parameters():
        parameter.requires_grad_(not name.startswith("mtp."))

    def forward(self, *args, **kwargs):
        kept = self.mtp_process, self.config
        self.mtp_process, self.config = False, copy.copy(self.config)
        self.config.mtp_num_layers = None
        try:
            return type(self).forward(self, *args, **kwargs)
        finally:
            self.mtp_process, self.config = kept

    flipped.forward = partial(forward, flipped)
    got, _ = train(flipped)
    expected, _ = train(reference)
    return compare(got, expected, kind)


def check_data_and_tensor(layout, distributed_optimizer, kinds):
    """On two tensor, expert or data parallel ranks."""
    from torpor.megatron.parallel import Layout, initialize

    initialize(Layout(**layout), seed=1)
    wrong = {}
    for kind in kinds:
        overrides = {"sequence_parallel": True} if layout.get("sequence_parallel") else {}
        if layout.get("expert"):
            overrides["expert_model_parallel_size"] = layout["expert"]
        dormant, reference = build_pair(kind, **overrides)
        handle = freeze_mtp(dormant)
        got, optimizer = train(dormant, distributed_optimizer=distributed_optimizer)
        expected, _ = train(reference, distributed_optimizer=distributed_optimizer)
        wrong[kind.name] = compare(got, expected, kind)
        handle.check(optimizer)
    return wrong


@pytest.mark.parametrize("kind", [GPT, GPT_TIED, HYBRID, HYBRID_TIED], ids=str)
def test_two_pipeline_stages(kind):
    """Losses, gradients, grad norms and weights after three steps are those of the model without MTP."""
    assert run_ranks(check_pipeline, 2, kind) == [[], []]


@pytest.mark.parametrize("kind", [GPT_TIED, HYBRID_TIED], ids=str)
def test_flipping_mtp_process_on_a_tied_model_is_caught(kind):
    """The last stage then projects with a random weight that nobody synchronises; the comparison sees it."""
    first, last = run_ranks(check_flipping_mtp_process, 2, kind)
    assert any(entry.startswith("loss") for entry in last)
    assert any("embedding" in entry for entry in first)


@pytest.mark.parametrize(
    ("layout", "distributed_optimizer", "kinds"),
    [
        ({"tensor": 2, "sequence_parallel": True}, False, [GPT, HYBRID_MOE]),
        ({"expert": 2}, False, [GPT_MOE, HYBRID_MOE]),
        ({}, True, [GPT_TIED, HYBRID]),
    ],
    ids=["tensor-sequence", "expert", "data-distributed-optimizer"],
)
def test_two_ranks(layout, distributed_optimizer, kinds):
    """The same on tensor (with sequence), expert and data parallel ranks."""
    for wrong in run_ranks(check_data_and_tensor, 2, layout, distributed_optimizer, kinds):
        assert wrong == {kind.name: [] for kind in kinds}
