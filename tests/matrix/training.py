"""Trains a dormant model and the same trunk built without MTP, and names every bit in which they differ."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from matrix.cases import Arrangement, Case
from tiny_models import SEQUENCE, batch, build, differing, same_bytes
from torpor import freeze_mtp
from torpor.errors import UnsupportedModelError

STEPS = 3
NUM_LAYERS = 4
# Where the samples of a packed row end, in chunks that context parallelism cuts once more.
PACKED_ENDS = (0, 8, 20, 2 * SEQUENCE)
FINAL_NORMS = ("decoder.final_layernorm.weight", "decoder.final_norm.weight")
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

# Puts the MTP layers of a rank's chunks to sleep; returns something with check(optimizer), or None.
Bypass = Callable[[list[torch.nn.Module]], Any]


def run_cases(cases: Sequence[Case], bypass: Bypass = freeze_mtp) -> dict[str, list[str]]:
    """Run cases of one layout on this rank.

    Args:
        cases: Cases that share their layout.
        bypass: What is meant to keep the MTP layers asleep.

    Returns:
        By the case's name what differs from the model built without MTP; nothing is right. For a case that
        is refused, the message.
    """
    found: dict[str, list[str]] = {}
    dormant: dict[Case, dict[str, Any]] = {}
    for case in cases:
        print(f"{case}: with MTP", flush=True)
        start_layout(case)
        if case.outcome.kind == "refused":
            found[str(case)] = _refusal(case)
        else:
            dormant[case] = _run_dormant(case, bypass)
    for case, got in dormant.items():
        print(f"{case}: without MTP", flush=True)
        # The groups of a model without MTP can be others: its embedding is on other ranks.
        start_layout(case, mtp=False)
        chunks = build_chunks(case, mtp=False, seed=101)
        load_trunk(chunks, got["start"], case)
        expected = train(chunks, case)[0]
        found[str(case)] = got["wrong"] + _compare(got, expected, case)
    return found


_STATES: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Process groups by what they are made of. Each keeps threads for as long as it lives and longer, so that the
groups of a layout are made once a process and switched to afterwards."""


def start_layout(case: Case, *, mtp: bool = True) -> None:
    """Make the process groups of the case's layout, as a training script does that knows where MTP sits."""
    from megatron.core import parallel_state, tensor_parallel

    layout, embedding_stages = case.layout, None
    if mtp and layout.is_mtp_apart and layout.mtp_in_embedding_group:
        mtp_stage = next(i for i, stage in enumerate(layout.stages.split("|")) if "m" in stage)
        # The stages that hold the word embedding: an untied output layer does not.
        embedding_stages = (0, mtp_stage, *[layout.pipeline - 1] * case.model.tied)
    sizes = (layout.tensor, layout.pipeline, layout.virtual, layout.expert, layout.context)
    key = (*sizes, embedding_stages)
    names = [name for name in vars(parallel_state) if name.startswith("_") and name[1:].isupper()]
    if key not in _STATES:
        if parallel_state.model_parallel_is_initialized():
            for name, value in _STATES["nothing",].items():
                setattr(parallel_state, name, value)
        else:
            _STATES["nothing",] = {name: getattr(parallel_state, name) for name in names}
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual,
            expert_model_parallel_size=layout.expert,
            context_parallel_size=layout.context,
            get_embedding_ranks=embedding_stages and (lambda ranks: [ranks[i] for i in embedding_stages]),
            create_gloo_process_groups=False,
        )
        _STATES[key] = {name: getattr(parallel_state, name) for name in names}
    for name, value in _STATES[key].items():
        setattr(parallel_state, name, value)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def build_chunks(case: Case, mtp: bool, seed: int, **overrides: Any) -> list[torch.nn.Module]:
    """Build this rank's chunks of the case's model, with its MTP layers or without.

    Args:
        case: The case.
        mtp: Whether to build the MTP layers.
        seed: Of the weights.
        overrides: Fields of the TransformerConfig.
    """
    layout, model = case.layout, case.model
    fields: dict[str, Any] = {
        "num_layers": NUM_LAYERS,
        "sequence_parallel": layout.sequence_parallel,
        "expert_model_parallel_size": layout.expert,
        "context_parallel_size": layout.context,
        "virtual_pipeline_model_parallel_size": layout.virtual,
        # What training scripts set; a stage's output is freed once it has been sent on.
        "deallocate_pipeline_outputs": True,
    }
    if layout.virtual:
        fields |= {
            "overlap_p2p_comm": not layout.batched_p2p,
            "batch_p2p_comm": layout.batched_p2p,
        }
    if model.moe:
        fields["moe_token_dispatcher_type"] = layout.dispatcher
    if case.recompute == "full":
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif case.recompute == "selective":
        fields["recompute_granularity"] = "selective"
    if layout.stages is not None and (model.pattern is None or layout.is_mtp_apart):
        fields["pipeline_model_parallel_layout"] = layout.stages.replace(
            "m", "m" * model.depths if mtp else ""
        )
    if model.pattern is not None and layout.cuts is not None:
        ends = [sum(layout.cuts[: i + 1]) for i in range(len(layout.cuts))]
        segments = [model.pattern[end - size : end] for end, size in zip(ends, layout.cuts, strict=True)]
        model = dataclasses.replace(model, pattern="|".join(segments))
    stages = range(layout.virtual) if layout.virtual else [None]
    return [build(model, mtp=mtp, seed=seed, vp_stage=stage, **fields | overrides) for stage in stages]


def trunk_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return copies of the trunk's parameters and buffers on this rank, named with the chunk's index."""
    tensors = {}
    for index, chunk in enumerate(chunks):
        for name, tensor in chunk.state_dict().items():
            if torch.is_tensor(tensor) and not name.startswith("mtp."):
                tensors[f"{index}.{name}"] = tensor.detach().clone()
    return tensors


# --- one layout -----------------------------------------------------------------------------------------


def _refusal(case: Case) -> list[str]:
    """Return the message with which freeze_mtp refuses a case, having changed nothing."""
    chunks = build_chunks(case, mtp=True, seed=1)
    before = [dict(vars(module)) for chunk in chunks for module in chunk.modules()]
    try:
        freeze_mtp(chunks)
    except UnsupportedModelError as error:
        after = [dict(vars(module)) for chunk in chunks for module in chunk.modules()]
        return [str(error)] if before == after else ["refused after something was changed"]
    return ["not refused"]


def _run_dormant(case: Case, bypass: Bypass) -> dict[str, Any]:
    """Train with the MTP layers asleep."""
    chunks = build_chunks(case, mtp=True, seed=1)
    retained = {
        f"{i}.{n}": t.detach().clone() for i, chunk in enumerate(chunks) for n, t in _mtp_tensors(chunk)
    }
    handle = bypass(chunks)
    start = trunk_tensors(chunks)
    got, optimizer = train(chunks, case)
    now = {f"{i}.{n}": t.detach() for i, chunk in enumerate(chunks) for n, t in _mtp_tensors(chunk)}
    wrong = [f"retained {name}" for name in differing(now, retained)]
    wrong += _differing_copies(chunks)
    if handle is not None:
        handle.check(optimizer)
    return {**got, "start": start, "wrong": wrong}


def _mtp_tensors(chunk: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    mtp = chunk._modules.get("mtp")
    return [] if mtp is None else [*mtp.named_parameters(), *mtp.named_buffers()]


def train(chunks: Sequence[torch.nn.Module], case: Case) -> tuple[dict[str, Any], Any]:
    """Take three steps as training scripts do, and one forward for logits before the first.

    Returns:
        Logits and losses of each microbatch (on the loss's stage), main gradients after the first step's
        finalize_model_grads, gradient norms, and the trunk after the last step; and the optimizer.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from torpor.megatron.optimizer import build_optimizer

    choice = case.optimizer
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=choice.distributed,
        overlap_grad_reduce=choice.overlap_grad_reduce,
        overlap_param_gather=choice.overlap_param_gather,
        bucket_size=8192,  # several buckets on the first stage
    )
    wrapped = [
        DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        if choice.overlap_grad_reduce:
            no_syncs = [ddp.no_sync for ddp in wrapped]
            chunk.config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
    optimizer = build_optimizer(
        wrapped,
        lr=1e-2,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        # Where the norm is summed in another order, a clipped gradient would not be the same to the bit.
        clip_grad=0.5 if case.has_exact_norm else 1e6,
        distributed=choice.distributed,
        dtype=torch.float32,
    )
    result: dict[str, Any] = {"logits": [], "losses": [], "grad_norms": [], "num_trained": 0}
    with torch.no_grad():
        _run_schedule(wrapped, case, seed=1000, results=result["logits"], with_labels=False)
    for step in range(STEPS):
        for ddp in wrapped:
            ddp.zero_grad_buffer()
        optimizer.zero_grad()
        _run_schedule(wrapped, case, seed=10 * step, results=result["losses"], with_labels=True)
        if step == 0:
            result["grads"] = _main_gradients(chunks, wrapped)
        is_updated, grad_norm, _ = optimizer.step()
        assert is_updated
        result["grad_norms"].append(float(grad_norm))
    if choice.overlap_param_gather:
        for ddp in wrapped:
            ddp.disable_forward_pre_hook(param_sync=True)
    result["weights"] = trunk_tensors(chunks)
    result["num_trained"] = sum(p.numel() for chunk in chunks for p in chunk.parameters() if p.requires_grad)
    return result, optimizer


def _run_schedule(wrapped, case: Case, *, seed: int, results: list, with_labels: bool) -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    seed += 100 * parallel_state.get_data_parallel_rank()
    batches = [_own_batch(case.layout, seed + index) for index in range(case.layout.num_microbatches)]
    if not with_labels:
        batches = [{**inputs, "labels": None} for inputs in batches]

    def finish(output, non_loss_data=False):
        results.append(output.detach().clone())
        # The schedule multiplies the loss by the context parallel size.
        mean = output.float().mean() / case.layout.context
        return output if non_loss_data else (mean, {"loss": mean.detach()})

    def step(iterator, model):
        return model(**next(iterator)), finish

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in wrapped] if len(wrapped) > 1 else iter(batches),
        model=wrapped,
        num_microbatches=case.layout.num_microbatches,
        seq_length=2 * SEQUENCE if case.layout.packed else SEQUENCE,
        micro_batch_size=1 if case.layout.packed else 2,
        forward_only=not with_labels,
        collect_non_loss_data=not with_labels,
    )


def _own_batch(layout: Arrangement, seed: int) -> dict[str, Any]:
    """Return this context parallel rank's part of a batch, its two rows in one if packed."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    from torpor.megatron.zigzag import zigzag_places

    inputs = batch(seed=seed)
    if not layout.packed and layout.context == 1:
        return inputs
    inputs["attention_mask"] = None  # causal all the same
    ends = torch.tensor(PACKED_ENDS if layout.packed else (0, SEQUENCE), dtype=torch.int32)
    places = zigzag_places(list(itertools.pairwise(ends.tolist())), layout.context)
    own = places[parallel_state.get_context_parallel_rank()]
    if layout.packed:
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in ends.diff()])
    inputs = {n: None if t is None else t.reshape(-1, int(ends[-1]))[:, own] for n, t in inputs.items()}
    ends = ends.to(inputs["input_ids"].device)
    if layout.packed:
        inputs["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=int(ends.diff().max()),
            max_seqlen_kv=int(ends.diff().max()),
        )
    return inputs


def _main_gradients(chunks, wrapped) -> dict[str, torch.Tensor]:
    """Return every main gradient whole: the distributed optimizer leaves each rank only its share."""
    for ddp in wrapped:
        if ddp.ddp_config.use_distributed_optimizer:
            for group in [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]:
                for bucket in group.buckets:
                    process_group = group.intra_distributed_optimizer_instance_group
                    shares = bucket.grad_data.view(process_group.size(), -1)
                    own = shares[process_group.rank()].clone()
                    torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=process_group)
    return {
        f"{index}.{name}": parameter.main_grad.clone()
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if hasattr(parameter, "main_grad")
    }


# --- comparing ------------------------------------------------------------------------------------------


def load_trunk(chunks, start: dict[str, torch.Tensor], case: Case) -> None:
    """Load the dormant model's trunk as it was into the model built without MTP, and nothing less."""
    known = _in_terms_of_reference(start, [chunk.state_dict() for chunk in chunks], case)
    for index, chunk in enumerate(chunks):
        state = {name.split(".", 1)[1]: t for name, t in known.items() if name.startswith(f"{index}.")}
        missing, unexpected = chunk.load_state_dict(state, strict=False)
        unknown = [name for name in missing if "_extra_state" not in name]
        assert not unknown, (unknown, unexpected)
        assert not unexpected, (unknown, unexpected)


def _in_terms_of_reference(tensors: dict[str, torch.Tensor], reference: list, case: Case) -> dict[str, Any]:
    """Rename this rank's tensors of a model with MTP as the model built without has them.

    A tied stage that holds MTP and the loss projects with its copy of the embedding, where the reference has
    an `output_layer.weight`; a stage that holds MTP and not the first embedding has copies that the
    reference lacks; the final norm may sit on an earlier stage.
    """
    known = dict(tensors)
    for name, tensor in _final_norms(tensors).items():
        known[name] = tensor
    for index, state in enumerate(reference):
        duplicate = known.pop(f"{index}.{EMBEDDING}", None) if EMBEDDING not in state else None
        if duplicate is not None and case.model.tied and OUTPUT in state:
            known[f"{index}.{OUTPUT}"] = duplicate
        for name in FINAL_NORMS:
            if name not in state:
                known.pop(f"{index}.{name}", None)
    return known


def _final_norms(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the final norm of whichever stage has it, under the name of every chunk here."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    own = {n.split(".", 1)[1]: t for n, t in tensors.items() if n.split(".", 1)[1] in FINAL_NORMS}
    everyone: list[dict[str, torch.Tensor]] = [{}] * group.size()
    torch.distributed.all_gather_object(everyone, own, group=group)
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return {f"{i}.{n}": t for there in everyone for n, t in there.items() for i in range(chunks)}


def _compare(got: dict[str, Any], expected: dict[str, Any], case: Case) -> list[str]:
    wrong = []
    for what in ("logits", "losses"):
        for index, (ours, theirs) in enumerate(zip(got[what], expected[what], strict=True)):
            if not same_bytes(ours, theirs):
                size = (ours - theirs).abs().max().item() if ours.shape == theirs.shape else ours.shape
                wrong.append(f"{what} {index} by {size}")
    tolerance = 0.0 if case.has_exact_norm else _norm_tolerance(expected)
    for ours, theirs in zip(got["grad_norms"], expected["grad_norms"], strict=True):
        if not math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=0.0):
            wrong.append(f"grad norm {ours} for {theirs}")
    for what in ("grads", "weights"):
        reference = [
            {n.split(".", 1)[1]: t for n, t in expected[what].items() if n.startswith(f"{index}.")}
            for index in range(case.layout.virtual or 1)
        ]
        ours = _in_terms_of_reference(got[what], reference, case)
        wrong += [f"{what} of {name}" for name in differing(ours, expected[what])]
    return wrong


def _norm_tolerance(expected: dict[str, Any]) -> float:
    """Return how far two orders of summing a gradient norm in FP32 can be apart.

    A sum of N squares, in any order, is off by at most N roundings of 2^-24 each, relative to the sum, since
    all terms are positive; its root by half of that; two such norms by twice the half.
    """
    count = torch.tensor(expected["num_trained"])
    torch.distributed.all_reduce(count)
    return count.item() * 2.0**-24


def _differing_copies(chunks) -> list[str]:
    """Name the copies of the word embedding that differ from the first stage's."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    own = [
        (f"chunk {index}", chunk.embedding.word_embeddings.weight.detach())
        for index, chunk in enumerate(chunks)
        if hasattr(chunk, "embedding")
    ]
    everyone: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everyone, own, group=group)
    first = everyone[0][0][1]
    return [
        f"the copy of the embedding on stage {stage} {name}"
        for stage, copies in enumerate(everyone)
        for name, copy in copies
        if not same_bytes(copy, first)
    ]
