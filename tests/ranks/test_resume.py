"""Resume on several ranks: bit-identical at every layout, and after a SIGKILL in the middle of a save."""

import os
import signal
import time

import pytest
import torch

import tiny
from megatron_steps import train_step, wrap_and_build_optimizer
from ranks.launch import RankFailedError, run_ranks
from torpor import freeze_mtp
from torpor.checkpoints.folder import open_folder
from torpor.errors import CheckpointError
from torpor.megatron import parallel
from torpor.megatron.checkpointing import find_latest, load_checkpoint, save_checkpoint
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import export_folder, load_weights

TOKENS = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))
# Folder, layout, distributed optimizer, dtype.
RUNS = {
    "dp2 distributed": ("hybrid", Layout(), True, torch.float32),
    "dp2 distributed bf16": ("hybrid", Layout(), True, torch.bfloat16),
    "tp2 plain bf16": ("hybrid", Layout(tensor=2, sequence_parallel=True), False, torch.bfloat16),
    "ep2 plain": ("hybrid", Layout(expert=2), False, torch.float32),
    "ep2 distributed": ("hybrid", Layout(expert=2), True, torch.float32),
    "pp2 tied plain": ("tied", Layout(pipeline=2), False, torch.float32),
    "pp2 tied distributed": ("tied", Layout(pipeline=2), True, torch.float32),
    "pp2 hybrid tied": ("hybrid-tied", Layout(pipeline=2), False, torch.float32),
}


def start(path, layout, distributed, dtype):
    parallel.initialize(layout, seed=3)
    chunks = build_model(open_folder(path).config, layout, dtype)
    load_weights(chunks, open_folder(path))
    freeze_mtp(chunks)
    return wrap_and_build_optimizer(chunks, distributed=distributed)


def weights(chunks):
    return {name: t.clone() for name, t in chunks[0].module.state_dict().items() if torch.is_tensor(t)}


def interrupt_and_resume(paths, out):
    """Two steps, a checkpoint, two steps; then two steps from the checkpoint: compare everything."""
    for name, (source, *run) in RUNS.items():
        chunks, optimizer = start(paths[source], *run)
        for _ in range(2):
            train_step(chunks, optimizer, TOKENS)
        checkpoint = save_checkpoint(out / name, 2, chunks, optimizer)
        saved = weights(chunks)
        losses = [train_step(chunks, optimizer, TOKENS) for _ in range(2)]
        drawn, expected = torch.rand(3), weights(chunks)
        changed = {key for key in saved if not torch.equal(saved[key], expected[key])}
        assert changed, name
        assert not any(key.startswith("mtp.") for key in changed), (name, changed)
        save_checkpoint(out / name, 4, chunks, optimizer)
        parallel.shutdown()

        chunks, optimizer = start(paths[source], *run)
        assert load_checkpoint(checkpoint, chunks, optimizer).step == 2
        assert [train_step(chunks, optimizer, TOKENS) for _ in range(2)] == losses, name
        assert torch.equal(torch.rand(3), drawn), name
        resumed = weights(chunks)
        assert resumed.keys() == expected.keys()
        assert [key for key in resumed if not torch.equal(resumed[key], expected[key])] == [], name
        parallel.shutdown()


@pytest.mark.timeout(600)
def test_a_resumed_run_equals_an_uninterrupted_one_at_every_layout(tmp_path, megatron_rank):
    """And the exports of the trained runs keep the source's MTP bytes while the trunk has moved."""
    paths = {
        "hybrid": tiny.write_nemotron_h(tmp_path / "hybrid", tokenizer=False),
        "tied": tiny.write_mimo(tmp_path / "tied", tokenizer=False, tie_word_embeddings=True),
        "hybrid-tied": tiny.write_nemotron_h(
            tmp_path / "hybrid-tied", tokenizer=False, tie_word_embeddings=True
        ),
    }
    run_ranks(interrupt_and_resume, 2, paths, tmp_path, timeout=500)
    for name, (source, *_) in RUNS.items():
        folder = open_folder(paths[source])
        export_folder(find_latest(tmp_path / name), folder, tmp_path / f"{name} export")
        export = open_folder(tmp_path / f"{name} export")
        kept = {n for n in folder.tensors if export.read_bytes(n) == folder.read_bytes(n)}
        assert {n for n in folder.tensors if "mtp" in n} <= kept
        assert len(kept) < len(folder.tensors)


def die_while_saving(path, out):
    """Save step 1, train on, and have rank 0 killed when the next save has written but not renamed."""
    chunks, optimizer = start(path, Layout(pipeline=2), False, torch.float32)
    train_step(chunks, optimizer, TOKENS)
    save_checkpoint(out, 1, chunks, optimizer)
    torch.save(weights(chunks), out / f"expected-{parallel.global_rank()}.pt")
    train_step(chunks, optimizer, TOKENS)
    if parallel.global_rank() == 0:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
    save_checkpoint(out, 2, chunks, optimizer)
    time.sleep(600)


def load_what_is_left(path, out):
    chunks, optimizer = start(path, Layout(pipeline=2), False, torch.float32)
    state = load_checkpoint(find_latest(out), chunks, optimizer)
    expected = torch.load(out / f"expected-{parallel.global_rank()}.pt")
    found = weights(chunks)
    train_step(chunks, optimizer, TOKENS)
    save_checkpoint(out, 2, chunks, optimizer)
    return state.step, all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.timeout(600)
def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path):
    path = tiny.write_mimo(tmp_path / "source", tokenizer=False)
    with pytest.raises(RankFailedError, match=r"rank \d of 2 failed"):
        run_ranks(die_while_saving, 2, path, tmp_path, timeout=400)
    assert find_latest(tmp_path).name == "step_00000001"
    assert (tmp_path / "step_00000002.partial").is_dir()
    assert run_ranks(load_what_is_left, 2, path, tmp_path, timeout=400) == [(1, True), (1, True)]
    assert find_latest(tmp_path).name == "step_00000002"
    assert not list(tmp_path.glob("*.partial"))


def resume_at_another_layout(path, out):
    chunks, optimizer = start(path, Layout(), False, torch.float32)
    train_step(chunks, optimizer, TOKENS)
    save_checkpoint(out, 1, chunks, optimizer)
    parallel.shutdown()
    chunks, optimizer = start(path, Layout(pipeline=2), False, torch.float32)
    with pytest.raises(CheckpointError, match="pipeline 1 there and 2 here, data 2 there and 1 here"):
        load_checkpoint(find_latest(out), chunks, optimizer)
    load_checkpoint(find_latest(out), chunks)
    width = 64 if parallel.is_last_stage() else 48
    config = open_folder(path).config | {"intermediate_size": width}
    chunks = build_model(config, Layout(pipeline=2), torch.float32)
    # What is wrong on one rank is raised on both, instead of leaving the other waiting.
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.1\.mlp.* has shape"):
        load_checkpoint(find_latest(out), chunks)


def test_another_layout_takes_the_weights_and_refuses_the_resume(tmp_path):
    path = tiny.write_mimo(tmp_path / "source", tokenizer=False)
    run_ranks(resume_at_another_layout, 2, path, tmp_path, timeout=400)
