"""Training checkpoints: bit-identical resume, whole at every moment, and clear refusals."""

import contextlib
import json
import random
import shutil
import sys

import numpy
import pytest
import torch

import tiny
from megatron_steps import train_step, wrap_and_build_optimizer
from torpor import freeze_mtp
from torpor.checkpoints.folder import open_folder
from torpor.errors import CheckpointError, ConfigError
from torpor.megatron.checkpointing import (
    find_latest,
    load_checkpoint,
    read_training_state,
    save_checkpoint,
)
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import export_folder, load_weights

TOKENS = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))


def build(folder, dtype=torch.float32, *, distributed=False, frozen=True, bucket_size=None):
    chunks = build_model(folder.config, Layout(), dtype)
    load_weights(chunks, folder)
    if frozen:
        freeze_mtp(chunks)
    return wrap_and_build_optimizer(chunks, distributed=distributed, bucket_size=bucket_size)


def weights(chunks):
    return {name: t.clone() for name, t in chunks[0].module.state_dict().items() if torch.is_tensor(t)}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def mimo(tmp_path):
    return open_folder(tiny.write_mimo(tmp_path / "source", tokenizer=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("write", [tiny.write_mimo, tiny.write_nemotron_h])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, megatron_rank, write, distributed, dtype):
    """Weights, losses and random numbers after the resume are the same bits; MTP is frozen and saved."""
    folder = open_folder(write(tmp_path / "source", tokenizer=False))
    chunks, optimizer = build(folder, dtype, distributed=distributed)
    for _ in range(2):
        train_step(chunks, optimizer, TOKENS)
    checkpoint = save_checkpoint(
        tmp_path / "run",
        2,
        chunks,
        optimizer,
        consumed_samples=4,
        scheduler_state={"num_steps": 2, "lr": 0.1 + 0.2},
        extra={"position": [1, 2]},
        fingerprint={"betas": (0.9, 0.95)},
    )
    saved = weights(chunks)
    losses = [train_step(chunks, optimizer, TOKENS) for _ in range(2)]
    drawn = (random.random(), numpy.random.rand(), torch.rand(1).item())
    expected = weights(chunks)
    assert not equal(saved, expected)

    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    resumed, new_optimizer = build(folder, dtype, distributed=distributed)
    state = load_checkpoint(checkpoint, resumed, new_optimizer, fingerprint={"betas": (0.9, 0.95)})
    assert (state.step, state.consumed_samples) == (2, 4)
    assert state.scheduler_state == {"num_steps": 2, "lr": 0.1 + 0.2}
    assert state.extra == {"position": [1, 2]}
    assert equal(saved, weights(resumed))
    assert [train_step(resumed, new_optimizer, TOKENS) for _ in range(2)] == losses
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == drawn
    assert equal(expected, weights(resumed))


def test_a_distributed_optimizer_of_several_buckets_resumes(tmp_path, megatron_rank, mimo):
    """Buckets with padding between them, and other buckets in the resumed run: still the same bits."""
    chunks, optimizer = build(mimo, distributed=True, bucket_size=500)
    (buffer,) = chunks[0].buffers
    assert len(buffer.buckets) > 2
    assert any(bucket.numel_unpadded < bucket.grad_data.numel() for bucket in buffer.buckets[:-1])
    for _ in range(2):
        train_step(chunks, optimizer, TOKENS)
    checkpoint = save_checkpoint(tmp_path / "run", 2, chunks, optimizer)
    train_step(chunks, optimizer, TOKENS)
    for bucket_size in (500, 900, None):
        resumed, new_optimizer = build(mimo, distributed=True, bucket_size=bucket_size)
        load_checkpoint(checkpoint, resumed, new_optimizer)
        train_step(resumed, new_optimizer, TOKENS)
        assert equal(weights(chunks), weights(resumed)), bucket_size


def test_optimizer_state_matters_to_the_comparison_above(tmp_path, megatron_rank, mimo):
    """Without the optimizer's state the resumed run goes elsewhere, and the test would notice."""
    chunks, optimizer = build(mimo)
    for _ in range(2):
        train_step(chunks, optimizer, TOKENS)
    checkpoint = save_checkpoint(tmp_path / "run", 2, chunks, optimizer)
    train_step(chunks, optimizer, TOKENS)
    resumed, new_optimizer = build(mimo)
    load_checkpoint(checkpoint, resumed)
    new_optimizer.reload_model_params()
    train_step(resumed, new_optimizer, TOKENS)
    assert not equal(weights(chunks), weights(resumed))


class Snapshots:
    """Copies a folder before every change of the file system: what a SIGKILL there would leave."""

    CHANGES = frozenset(("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate"))

    def __init__(self, folder, out):
        self.folder, self.out, self.is_active, self.taken = folder, out, False, []
        sys.addaudithook(self._observe)

    def _observe(self, event, args):
        if not self.is_active or event not in self.CHANGES:
            return
        if event == "open" and (not isinstance(args[1], str) or not set(args[1]) & set("wax+")):
            return
        self.is_active = False
        with contextlib.suppress(FileNotFoundError):
            self.taken.append(shutil.copytree(self.folder, self.out / str(len(self.taken))))
        self.is_active = True

    @contextlib.contextmanager
    def active(self):
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False


def test_a_kill_at_any_moment_leaves_a_whole_latest_checkpoint(tmp_path, megatron_rank, mimo):
    """At every change on disk during a save, `latest` is the old or the new checkpoint, whole."""
    chunks, optimizer = build(mimo)
    states = {}
    for step in (1, 2):
        train_step(chunks, optimizer, TOKENS)
        save_checkpoint(tmp_path / "run", step, chunks, optimizer, keep=1)
        states[step] = weights(chunks)
    train_step(chunks, optimizer, TOKENS)
    states[3] = weights(chunks)
    snapshots = Snapshots(tmp_path / "run", tmp_path)
    with snapshots.active():
        save_checkpoint(tmp_path / "run", 3, chunks, optimizer, keep=1)

    found, victim = [], build(mimo)
    for snapshot in snapshots.taken:
        latest = find_latest(snapshot)
        state = load_checkpoint(latest, *victim)
        assert equal(weights(victim[0]), states[state.step])
        found.append(state.step)
        # A restart after this kill reaches step 3 again and saves it over whatever the kill left.
        if state.step == 2:
            again = save_checkpoint(snapshot, 3, chunks, optimizer, keep=1)
            assert {path.name for path in snapshot.iterdir()} == {"latest", again.name}
    assert found == sorted(found)
    assert found.count(2) > 5
    assert found.count(3) > 5


def test_old_checkpoints_are_pruned(tmp_path, megatron_rank, mimo):
    chunks = build_model(mimo.config, Layout(), torch.float32)
    for step in (1, 2, 3, 10):
        save_checkpoint(tmp_path / "run", step, chunks, keep=2)
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"latest", "step_00000003", "step_00000010"}
    assert find_latest(tmp_path / "run").name == "step_00000010"
    with pytest.raises(ConfigError, match="keep is 0"):
        save_checkpoint(tmp_path / "run", 11, chunks, keep=0)


def test_latest_of_nothing_is_none(tmp_path):
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "absent") is None


@pytest.mark.parametrize("lost", ["torpor.json", ".metadata", "metadata.json"])
def test_a_latest_that_is_not_whole_is_refused(tmp_path, megatron_rank, mimo, lost):
    chunks = build_model(mimo.config, Layout(), torch.float32)
    checkpoint = save_checkpoint(tmp_path / "run", 1, chunks)
    (checkpoint / lost).unlink()
    with pytest.raises(CheckpointError, match=lost):
        find_latest(tmp_path / "run")


def test_a_latest_that_points_elsewhere_is_refused(tmp_path):
    (tmp_path / "latest").write_text("../other\n")
    with pytest.raises(CheckpointError, match=r"'\.\./other'"):
        find_latest(tmp_path)


def test_an_earlier_step_cannot_be_saved_after_a_later_one(tmp_path, megatron_rank, mimo):
    chunks = build_model(mimo.config, Layout(), torch.float32)
    save_checkpoint(tmp_path / "run", 5, chunks)
    for step in (4, 5):
        with pytest.raises(CheckpointError, match="already has step_00000005"):
            save_checkpoint(tmp_path / "run", step, chunks)


def test_other_settings_are_refused_with_both_values(tmp_path, megatron_rank, mimo):
    chunks, optimizer = build(mimo)
    checkpoint = save_checkpoint(tmp_path / "run", 1, chunks, optimizer, fingerprint={"lr": 0.1, "seed": 1})
    with pytest.raises(ConfigError, match=r"lr: 0\.1 there, 0\.2 here") as error:
        load_checkpoint(checkpoint, chunks, optimizer, fingerprint={"lr": 0.2, "seed": 1})
    assert "seed" not in str(error.value)
    with pytest.raises(ConfigError, match="new: None there, 1 here"):
        load_checkpoint(checkpoint, chunks, optimizer, fingerprint={"lr": 0.1, "seed": 1, "new": 1})


def test_another_kind_of_optimizer_is_refused(tmp_path, megatron_rank, mimo):
    chunks, optimizer = build(mimo, distributed=False)
    checkpoint = save_checkpoint(tmp_path / "run", 1, chunks, optimizer)
    others = build(mimo, distributed=True)
    with pytest.raises(CheckpointError, match="plain optimizer; this run's is distributed"):
        load_checkpoint(checkpoint, *others)
    bare = save_checkpoint(tmp_path / "bare", 1, chunks)
    with pytest.raises(CheckpointError, match="no optimizer"):
        load_checkpoint(bare, chunks, optimizer)


def test_another_layout_is_refused_for_a_resume_but_not_for_weights(tmp_path, megatron_rank, mimo):
    chunks, optimizer = build(mimo)
    checkpoint = save_checkpoint(tmp_path / "run", 1, chunks, optimizer)
    file = checkpoint / "torpor.json"
    state = json.loads(file.read_text())
    state["layout"]["tensor"] = 2
    file.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="tensor 2 there and 1 here"):
        load_checkpoint(checkpoint, chunks, optimizer)
    assert load_checkpoint(checkpoint, chunks).step == 1


def test_other_models_are_refused_before_anything_is_loaded(tmp_path, megatron_rank, mimo):
    """Missing layers, surplus layers, other shapes: each names a tensor, and no weight has moved."""
    chunks = build_model(mimo.config, Layout(), torch.float32)
    checkpoint = save_checkpoint(tmp_path / "run", 1, chunks)
    for field, value, message in (
        ("num_hidden_layers", 3, r"has no decoder\.layers\.2"),
        ("num_hidden_layers", 1, r"holds decoder\.layers\.1.*nothing here takes"),
        ("num_nextn_predict_layers", 0, r"holds mtp\.layers\.0"),
        ("intermediate_size", 64, "has shape"),
    ):
        (other,) = build_model(mimo.config | {field: value}, Layout(), torch.float32)
        before = {name: p.clone() for name, p in other.named_parameters()}
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(checkpoint, [other])
        assert all(torch.equal(p, before[name]) for name, p in other.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("write", [tiny.write_mimo, tiny.write_nemotron_h])
def test_heads_that_wake_up_get_new_optimizer_state(
    tmp_path, megatron_rank, caplog, write, distributed, dtype
):
    """A dormant run's checkpoint has none for them; all else goes on to the bit, and a warning says so."""
    from megatron.core import dist_checkpointing

    folder = open_folder(write(tmp_path / "source", tokenizer=False))
    dormant = build(folder, dtype, distributed=distributed)
    for _ in range(2):
        train_step(*dormant, TOKENS)
    checkpoint = save_checkpoint(tmp_path / "asleep", 2, *dormant)

    awake = build(folder, dtype, distributed=distributed, frozen=False)
    load_checkpoint(checkpoint, *awake)
    assert "the optimizer begins anew for" in caplog.text
    before, after = (
        {
            name: t
            for name, t in dist_checkpointing.load_plain_tensors(str(path)).items()
            if torch.is_tensor(t)
        }
        for path in (checkpoint, save_checkpoint(tmp_path / "awake", 2, *awake))
    )
    assert [name for name in before if not torch.equal(after[name], before[name])] == []
    new = {name for name in after if name not in before}
    assert new
    assert all(name.split(".", 3)[3].startswith("mtp.") for name in new)
    averages = {name for name in new if name.startswith("optimizer.state.exp_avg")}
    assert not any(after[name].any() for name in averages)
    # What else there is are FP32 copies of the weights.
    copies = {name: after[name.split(".", 3)[3]].float() for name in new - averages}
    assert [name for name in copies if not torch.equal(after[name], copies[name])] == []
    train_step(*awake, TOKENS)
    trained = weights(awake[0])
    still = {name for name, t in weights(dormant[0]).items() if torch.equal(t, trained[name])}
    assert not any(name.startswith("mtp.") and name.endswith("eh_proj.weight") for name in still)


def test_a_checkpoint_with_heads_awake_is_not_for_a_dormant_run(tmp_path, megatron_rank, mimo):
    """Its optimizer holds more than a dormant run's takes: named, not dropped."""
    awake = build(mimo, frozen=False)
    train_step(*awake, TOKENS)
    checkpoint = save_checkpoint(tmp_path / "run", 1, *awake)
    dormant = build(mimo)
    with pytest.raises(CheckpointError, match=r"holds optimizer\.state\.\w+\.mtp\."):
        load_checkpoint(checkpoint, *dormant)
    load_checkpoint(checkpoint, dormant[0])


def test_damaged_tensor_file_is_refused(tmp_path, megatron_rank, mimo):
    chunks = build_model(mimo.config, Layout(), torch.float32)
    checkpoint = save_checkpoint(tmp_path / "run", 1, chunks)
    (file,) = checkpoint.glob("*.distcp")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="cannot be read by rank 0"):
        load_checkpoint(checkpoint, chunks)
    with pytest.raises(CheckpointError, match="cannot be read: "):
        export_folder(checkpoint, mimo, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_directory_that_cannot_be_written_is_refused(tmp_path, megatron_rank, mimo):
    (tmp_path / "run").write_text("a file where the folder should be")
    chunks = build_model(mimo.config, Layout(), torch.float32)
    with pytest.raises(CheckpointError, match=r"run cannot be written: .*exists"):
        save_checkpoint(tmp_path / "run", 1, chunks)


def test_unreadable_state_is_refused(tmp_path):
    for text in ("", "[]", '{"step": 1}', '{"unknown": 1}'):
        (tmp_path / "torpor.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"torpor\.json"):
            read_training_state(tmp_path)
