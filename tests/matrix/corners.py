"""What the ranks of test_corners.py do: checkpoints of tied models, expert biases, reported MoE losses."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tiny
from matrix.cases import Arrangement, Case
from matrix.training import (
    NUM_LAYERS,
    build_chunks,
    load_trunk,
    start_layout,
    train,
    trunk_tensors,
)
from megatron_steps import logits_of, train_step, wrap_and_build_optimizer
from tiny_models import differing
from torpor import freeze_mtp
from torpor.checkpoints.folder import open_folder
from torpor.dormancy.moe_metrics import CountLayersThatRan
from torpor.megatron import zigzag

TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def losses_without_mtp(cases: Sequence[Case], folder: Path) -> list[list[torch.Tensor]]:
    """Train one model built without MTP at several layouts, from the weights that it has at the first.

    Returns:
        The losses at each, on the rank that computes them.
    """
    from torpor.megatron.checkpointing import find_latest, load_checkpoint, save_checkpoint

    losses = []
    for case in cases:
        start_layout(case)
        chunks = build_chunks(case, mtp=False, seed=1)
        if case == cases[0]:
            save_checkpoint(folder, 1, chunks)
        load_checkpoint(find_latest(folder), chunks)
        losses.append(train(chunks, case)[0]["losses"])
    return losses


def train_asleep(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Train with the MTP layers asleep and return what `train` does, of this rank, for each case."""
    results = []
    for case in cases:
        start_layout(case)
        chunks = build_chunks(case, mtp=True, seed=1)
        handle = freeze_mtp(chunks)
        result, optimizer = train(chunks, case)
        handle.check(optimizer)
        results.append(result)
    return results


def train_asleep_and_in_a_row(cases: Sequence[Case], wrong: Case) -> list[dict[str, Any]]:
    """Do that, and at last a case with halved batches: the first rank takes the first half, not the ends."""
    results = train_asleep(cases)
    zigzag.zigzag_places = lambda bounds, size: torch.arange(bounds[-1][1]).view(size, -1)
    return results + train_asleep([wrong])


def move_expert_biases(cases: Sequence[Case]) -> list[dict[str, float]]:
    """Train with the MTP layers asleep and return how far each router's expert bias has moved."""
    moved = []
    for case in cases:
        start_layout(case)
        chunks = build_chunks(case, mtp=True, seed=1)
        before = _expert_biases(chunks)
        handle = freeze_mtp(chunks)
        _, optimizer = train(chunks, case)
        handle.check(optimizer)
        after = _expert_biases(chunks)
        assert {name for name in before if name.startswith("mtp.")} <= set(handle.fingerprint())
        moved.append({name: (after[name] - before[name]).abs().max().item() for name in before})
    return moved


def _expert_biases(chunks) -> dict[str, torch.Tensor]:
    return {n: b.detach().clone() for c in chunks for n, b in c.named_buffers() if n.endswith("expert_bias")}


def report_aux_losses(cases: Sequence[Case], count_all: bool = False) -> list[tuple[float, float]]:
    """Return the mean auxiliary loss that Megatron reports, asleep and for the model built without MTP.

    Args:
        cases: Models with MoE layers.
        count_all: Whether to take Torpor's count of the layers that ran away again.
    """
    return [_report_aux_loss(case, count_all) for case in cases]


def _report_aux_loss(case: Case, count_all: bool) -> tuple[float, float]:
    from megatron.core.transformer.moe.moe_logging import (
        destroy_moe_metrics_tracker,
        get_moe_metrics_tracker,
    )

    balancing = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
    }

    def report(chunks) -> float:
        config = chunks[0].config
        totals: dict[str, Any] = {}
        # As a training loop calls it; on stages without MoE layers too.
        get_moe_metrics_tracker().report(
            loss_scale=1 / case.layout.num_microbatches,
            iteration=1,
            force_initialize=True,
            track_names=["load_balancing_loss"],
            num_layers=config.num_layers,
            mtp_num_layers=config.mtp_num_layers,
            total_loss_dict=totals,
        )
        return float(totals["load_balancing_loss"])

    start_layout(case)
    chunks = build_chunks(case, mtp=True, seed=1, **balancing)
    handle = freeze_mtp(chunks)
    if count_all:
        CountLayersThatRan.uninstall()
    start = trunk_tensors(chunks)
    train(chunks, case)
    asleep = report(chunks)
    if not count_all:
        handle.remove()
    destroy_moe_metrics_tracker()

    chunks = build_chunks(case, mtp=False, seed=101, **balancing)
    load_trunk(chunks, start, case)
    train(chunks, case)
    without = report(chunks)
    destroy_moe_metrics_tracker()
    return asleep, without


def save_and_load_tied(cases: Sequence[Case], single: Arrangement, folder: Path) -> list[dict[str, Any]]:
    """Train tied models asleep on several stages, save them in both ways, load each into ordinary models.

    Args:
        cases: Tied models at their layout.
        single: A layout of one stage to load them at.
        folder: Where to save.

    Returns:
        What this rank saw of each, for the test to judge.
    """
    return [
        _save_and_load_tied(case, dataclasses.replace(case, layout=single), folder / str(case.model))
        for case in cases
    ]


def _save_and_load_tied(case: Case, single: Case, folder: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    from torpor.megatron.checkpointing import find_latest, load_checkpoint, save_checkpoint

    seen: dict[str, Any] = {}
    start_layout(case)
    chunks = build_chunks(case, mtp=True, seed=1)
    names = list(chunks[0].state_dict())
    parameters = dict(chunks[0].named_parameters())
    try:
        chunks[0].sharded_state_dict()
        seen["ordinary"] = "saves"
    except AssertionError:
        seen["ordinary"] = "cannot be saved"
    handle = freeze_mtp(chunks)
    seen["same names asleep"] = sorted(chunks[0].state_dict()) == sorted(names)
    seen["trained"], optimizer = train(chunks, case)
    handle.check(optimizer)

    save_checkpoint(folder / "torpor", 1, chunks, optimizer)
    plain = folder / "plain"
    if torch.distributed.get_rank() == 0:
        plain.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save({"model": chunks[0].sharded_state_dict()}, str(plain))
    logits = logits_of(chunks, TOKENS)
    state = {n: t.clone() for n, t in chunks[0].state_dict().items() if torch.is_tensor(t)}

    # A second model of the same kind takes the state dict and the checkpoint, strictly.
    again = build_chunks(case, mtp=True, seed=2)
    again_handle = freeze_mtp(again)
    again[0].load_state_dict(state, strict=True)
    seen["differing after load_state_dict"] = differing(state, _tensors(again[0]))
    load_checkpoint(find_latest(folder / "torpor"), again)
    seen["differing after load_checkpoint"] = differing(
        _trunk_and_mtp(state), _trunk_and_mtp(_tensors(again[0]))
    )
    again_handle.check()

    handle.remove()
    seen["same names awake"] = list(chunks[0].state_dict()) == names
    awake = dict(chunks[0].named_parameters())
    seen["same parameters"] = awake.keys() == parameters.keys() and all(
        awake[name] is parameters[name] for name in parameters
    )
    seen["state differs awake"] = differing(state, _tensors(chunks[0]))

    start_layout(single)
    ordinary = build_chunks(single, mtp=True, seed=3)
    loaded = dist_checkpointing.load({"model": ordinary[0].sharded_state_dict()}, str(plain))
    ordinary[0].load_state_dict(loaded["model"], strict=True)
    seen["logits plain"] = logits_of(ordinary, TOKENS)
    ordinary = build_chunks(single, mtp=True, seed=4)
    load_checkpoint(find_latest(folder / "torpor"), ordinary)
    seen["logits torpor"] = logits_of(ordinary, TOKENS)
    seen["logits asleep"] = logits
    return seen


def _tensors(chunk) -> dict[str, torch.Tensor]:
    return {n: t.detach() for n, t in chunk.state_dict().items() if torch.is_tensor(t)}


def _trunk_and_mtp(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out the output weight that nothing reads; no checkpoint holds it."""
    return {n: t for n, t in state.items() if n != "output_layer.weight"}


def distil_tied_folder(source: Path, out: Path, pipeline: int) -> int:
    """Load a tied folder on several stages, train two steps asleep and save.

    Returns:
        The number of retained tensors on this rank.
    """
    from torpor.megatron import parallel
    from torpor.megatron.checkpointing import save_checkpoint
    from torpor.megatron.models import build_model
    from torpor.megatron.parallel import Layout
    from torpor.megatron.weights import load_weights

    layout = Layout(pipeline=pipeline)
    parallel.initialize(layout, seed=1)
    folder = open_folder(source)
    chunks = build_model(folder.config, layout, torch.float32)
    load_weights(chunks, folder)
    handle = freeze_mtp(chunks)
    wrapped, optimizer = wrap_and_build_optimizer(chunks, distributed=False)
    for _ in range(2):
        train_step(wrapped, optimizer, TOKENS)
    report = handle.check(optimizer)
    save_checkpoint(out, 2, wrapped, optimizer)
    parallel.shutdown()
    return report.num_tensors


def write_tied_folder(path: Path) -> Path:
    """Write a tied Hugging Face folder that divides over four stages."""
    return tiny.write_mimo(path, layers=NUM_LAYERS, tie_word_embeddings=True, tokenizer=False)
