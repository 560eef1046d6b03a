"""The teacher's likeliest tokens on disk: what is read is what the teacher says; stale files are refused."""

import dataclasses
import fcntl
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny
import torpor
from torpor.checkpoints.folder import open_folder
from torpor.errors import ConfigError
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import load_weights
from torpor.training.config import OptimizationConfig
from torpor.training.data import BatchPlan, PackedWindows
from torpor.training.distillation import (
    build_distillation_model,
    cached_distillation_objective,
    distillation_objective,
)
from torpor.training.loop import evaluate, prepare_job, run_step
from torpor.training.losses import LossSettings
from torpor.training.teacher_cache import (
    NAME,
    CacheContent,
    WindowsWithTeacher,
    _share_of,
    open_teacher_cache,
    write_teacher_cache,
)

K = 5


def load(path, dtype):
    folder = open_folder(path)
    chunks = build_model(folder.config, Layout(), dtype)
    load_weights(chunks, folder)
    torpor.freeze_mtp(chunks)
    return chunks[0]


class Inputs:
    def __init__(self, path, dtype):
        tiny.write_mimo(path / "teacher", seed=1, tokenizer=False)
        tiny.write_mimo(path / "student", seed=2, tokenizer=False)
        np.save(path / "tokens.npy", np.random.RandomState(0).randint(0, 320, 700).astype(np.uint16))
        self.path = path
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        self.windows = PackedWindows(path / "tokens.npy", sequence_length=16, held_out=0.1, seed=1)
        self.settings = OptimizationConfig(
            sequence_length=16, micro_batch_size=2, global_batch_size=2, steps=3, lr=1e-2, dtype=dtype
        )
        self.content = CacheContent("teacher", "data", 43, 16, K, 320, dtype)

    def write(self):
        teacher = load(self.path / "teacher", self.dtype)
        write_teacher_cache(self.path / "cache", self.content, teacher, self.windows, self.settings)
        return open_teacher_cache(self.path / "cache", self.content)


@pytest.fixture(params=["fp32", "bf16"])
def inputs(request, megatron_rank, tmp_path):
    return Inputs(tmp_path, request.param)


@pytest.fixture
def fp32(megatron_rank, tmp_path):
    return Inputs(tmp_path, "fp32")


def test_what_is_read_is_what_the_teacher_says(inputs):
    cache = inputs.write()
    assert [path.name for path in (inputs.path / "cache").iterdir()] == [NAME]
    teacher = load(inputs.path / "teacher", inputs.dtype).eval()
    windows = [0, 42]  # 43 windows in micro-batches of 2: the last one stands alone
    batch = inputs.windows.batch(windows, torch.device("cpu"))
    with torch.no_grad():
        logits_BSV = teacher(batch.tokens_BS, batch.positions_BS, None)
    ids, logits = cache.read(windows, 3)
    assert logits.dtype == inputs.dtype
    assert torch.equal(logits, logits_BSV.topk(3, dim=-1).values)
    assert torch.equal(logits_BSV.gather(-1, ids), logits)


@pytest.mark.parametrize("k", [K, 2])
def test_training_from_the_cache_is_training_from_the_teacher(inputs, k):
    if inputs.dtype == torch.bfloat16 and k < K:
        pytest.skip("rounded logits tie, and which of two equals is the last of k depends on k")
    settings = LossSettings(top_k=k, temperature=2.0, cross_entropy_weight=0.1)
    teacher = load(inputs.path / "teacher", inputs.dtype)
    beside = build_distillation_model(load(inputs.path / "student", inputs.dtype), teacher)
    live = prepare_job([beside], inputs.settings, inputs.windows, distillation_objective(settings), steps=3)
    cached = prepare_job(
        [load(inputs.path / "student", inputs.dtype)],
        inputs.settings,
        WindowsWithTeacher(inputs.windows, inputs.write(), k),
        cached_distillation_objective(settings),
        steps=3,
    )
    for step in range(3):
        assert run_step(live, step).metrics == run_step(cached, step).metrics
    assert evaluate(live, 1) == evaluate(cached, 1)


class TestRefusals:
    @pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CacheContent)])
    def test_a_cache_of_something_else(self, fp32, name):
        fp32.write()
        value = getattr(fp32.content, name)
        other = value + 1 if isinstance(value, int) else "bf16" if name == "dtype" else "other"
        with pytest.raises(ConfigError, match=f"{name}: {value} there, {other} here"):
            open_teacher_cache(fp32.path / "cache", dataclasses.replace(fp32.content, **{name: other}))

    def test_a_cache_with_more_tokens_serves(self, fp32):
        fp32.write()
        assert open_teacher_cache(fp32.path / "cache", dataclasses.replace(fp32.content, top_k=2))

    @pytest.mark.parametrize("damage", [b"", b"\x00" * 100, b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}"])
    def test_a_file_that_is_no_cache(self, fp32, damage):
        (fp32.path / "cache").mkdir()
        (fp32.path / "cache" / NAME).write_bytes(damage)
        with pytest.raises(ConfigError, match="is no cache of a teacher"):
            open_teacher_cache(fp32.path / "cache", fp32.content)

    def test_a_disk_without_room(self, fp32, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(ConfigError, match="GiB are free"):
            fp32.write()
        assert not (fp32.path / "cache").exists()

    def test_a_file_in_the_place_of_the_folder(self, fp32):
        (fp32.path / "cache").touch()
        with pytest.raises(ConfigError, match="is a file"):
            fp32.write()

    def test_a_file_that_another_process_is_writing(self, fp32):
        (fp32.path / "cache").mkdir()
        partial = fp32.path / "cache" / (NAME + ".partial")
        with partial.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(b"theirs")
            file.flush()
            with pytest.raises(ConfigError, match="another process is writing"):
                fp32.write()
            assert partial.read_bytes() == b"theirs"
        assert fp32.write() is not None  # what a process that was killed has left is in nobody's way

    def test_a_file_that_was_finished_while_it_was_opened(self, fp32, monkeypatch):
        cache = fp32.write()
        before = (fp32.path / "cache" / NAME).read_bytes()
        partial = fp32.path / "cache" / (NAME + ".partial")
        (fp32.path / "cache" / NAME).rename(partial)
        monkeypatch.setattr(fcntl, "flock", lambda *_: partial.rename(fp32.path / "cache" / NAME))
        with pytest.raises(ConfigError, match="another process is writing"):
            fp32.write()
        assert (fp32.path / "cache" / NAME).read_bytes() == before
        assert cache.read([0], 1)

    def test_a_truncated_file(self, fp32):
        fp32.write()
        path = fp32.path / "cache" / NAME
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
        with pytest.raises(ConfigError, match="its header says"):
            open_teacher_cache(fp32.path / "cache", fp32.content)


def test_an_interrupted_pass_leaves_no_cache(fp32):
    teacher = load(fp32.path / "teacher", fp32.dtype)
    calls = []

    def fail(*_):
        calls.append(True)
        if len(calls) == 3:
            raise KeyboardInterrupt

    hook = teacher.decoder.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        write_teacher_cache(fp32.path / "cache", fp32.content, teacher, fp32.windows, fp32.settings)
    hook.remove()
    assert open_teacher_cache(fp32.path / "cache", fp32.content) is None
    assert fp32.write() is not None


@pytest.mark.parametrize(("num_windows", "data_size", "size"), [(7, 2, 2), (8, 2, 2), (1, 4, 1), (5, 3, 2)])
def test_every_window_is_somebodys_and_all_ranks_run_in_step(num_windows, data_size, size):
    shares = [_share_of(BatchPlan(size, 99, rank, data_size), num_windows) for rank in range(data_size)]
    assert {window for share in shares for batch in share for window in batch} == set(range(num_windows))
    assert len({len(share) for share in shares}) == 1
    assert {len(batch) for share in shares for batch in share} == {size}
