"""The divergence that is trained on, and that the heads stay out of it."""

import numpy as np
import pytest
import torch

import tiny
import torpor
from torpor.checkpoints.folder import open_folder
from torpor.errors import MTPExecutedError
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import load_weights
from torpor.training import distillation
from torpor.training.config import OptimizationConfig
from torpor.training.data import PackedWindows
from torpor.training.distillation import build_distillation_model, distillation_objective
from torpor.training.loop import evaluate, prepare_job, run_step

WRITERS = {"hybrid": tiny.write_nemotron_h, "dense": tiny.write_mimo}
SETTINGS = {
    "sequence_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "steps": 4,
    "lr": 1e-2,
}


@pytest.fixture(params=["hybrid", "dense"])
def folders(request, tmp_path):
    write = WRITERS[request.param]
    write(tmp_path / "teacher", seed=1, tokenizer=False)
    write(tmp_path / "student", seed=2, tokenizer=False)
    return tmp_path


@pytest.fixture
def packed(tmp_path):
    tokens = np.random.RandomState(0).randint(0, 320, 2000)
    np.save(tmp_path / "tokens.npy", tokens.astype(np.uint16))
    return PackedWindows(tmp_path / "tokens.npy", sequence_length=16, held_out=0.1, seed=1)


def load(path, dtype=torch.float32, mtp=True):
    folder = open_folder(path)
    chunks = build_model(folder.config, Layout(), dtype, mtp=mtp)
    load_weights(chunks, folder)
    return chunks[0]


def build(folders, packed, *, temperature=1.0, frozen=True, mtp=True, dtype="fp32"):
    weights = torch.float32 if dtype == "fp32" else torch.bfloat16
    student, teacher = (load(folders / name, weights, mtp) for name in ("student", "teacher"))
    handles = [torpor.freeze_mtp(model) for model in (student, teacher)] if frozen else []
    model = build_distillation_model(student, teacher, temperature=temperature)
    settings = OptimizationConfig(**SETTINGS, dtype=dtype)
    return prepare_job([model], settings, packed, distillation_objective(), steps=4), handles


def logits(model, batch):
    """Logits [b, s, v] of a bare model."""
    model.eval()
    with torch.no_grad():
        return model(input_ids=batch.tokens_BS, position_ids=batch.positions_BS, attention_mask=None).float()


def expected(folders, batches, temperature=1.0):
    """The divergence and the cross-entropy, written down from their definitions."""
    student, teacher = (load(folders / name, mtp=False) for name in ("student", "teacher"))
    divergences, entropies = [], []
    for batch in batches:
        s, t = logits(student, batch), logits(teacher, batch)
        p, q = (t / temperature).softmax(-1), (s / temperature).log_softmax(-1)
        divergences.append((p * (p.log() - q)).sum(-1).mean())
        entropies.append(torch.nn.functional.cross_entropy(s.flatten(0, 1), batch.labels_BS.flatten()))
    return float(torch.stack(divergences).mean()), float(torch.stack(entropies).mean())


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_is_the_divergence_of_the_logits(megatron_rank, folders, packed, temperature):
    job, _ = build(folders, packed, temperature=temperature)
    divergence, _ = expected(folders, job.training_batches(0), temperature)
    assert run_step(job, 0).metrics["loss"] == pytest.approx(divergence, rel=1e-4)


def test_evaluation_in_fp32_compares_logits_that_the_cross_entropy_has_not_touched(
    megatron_rank, folders, packed, monkeypatch
):
    job, _ = build(folders, packed)
    divergence, entropy = expected(folders, job.held_out_batches(0))
    metrics = evaluate(job, 1)
    assert metrics["loss"] == pytest.approx(divergence, rel=1e-4)
    assert metrics["cross_entropy"] == pytest.approx(entropy, rel=1e-4)

    monkeypatch.setattr(distillation, "_copy_for_cross_entropy", lambda *_: None)
    job, _ = build(folders, packed)
    assert evaluate(job, 1)["loss"] != pytest.approx(divergence, rel=1e-2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_four_steps_asleep_equal_four_steps_of_models_without_heads(megatron_rank, folders, packed, dtype):
    asleep, handles = build(folders, packed, dtype=dtype)
    without, _ = build(folders, packed, dtype=dtype, mtp=False, frozen=False)
    assert [run_step(asleep, step).metrics for step in range(4)] == [
        run_step(without, step).metrics for step in range(4)
    ]
    for handle in handles:
        assert handle.check(asleep.optimizer).executions == 0


def test_the_check_fails_if_the_heads_are_called(megatron_rank, folders, packed):
    job, (student, _) = build(folders, packed)
    run_step(job, 0)
    model = job.chunks[0].module
    with pytest.raises(MTPExecutedError):
        model.mtp.layers[0](None)
    with pytest.raises(MTPExecutedError):
        student.check(job.optimizer)


def test_awake_heads_run_and_train_in_the_student(megatron_rank, folders, packed):
    job, _ = build(folders, packed, frozen=False)
    before = {
        n: p.detach().clone() for n, p in job.chunks[0].module.named_parameters() if n.startswith("mtp.")
    }
    teacher = [p.detach().clone() for p in job.chunks[0].module.teacher_model.parameters()]
    record = run_step(job, 0)
    assert record.metrics["mtp_loss"] > 0
    after = dict(job.chunks[0].module.named_parameters())
    assert any(not torch.equal(value, after[name]) for name, value in before.items())
    for old, new in zip(teacher, job.chunks[0].module.teacher_model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_checkpoint_of_the_converted_model_is_the_students_alone(megatron_rank, folders, packed):
    plain = load(folders / "student")
    job, _ = build(folders, packed)
    converted = job.chunks[0].module
    metadata = {"non_homogeneous_layers": True}
    assert set(converted.sharded_state_dict(metadata=dict(metadata))) == set(
        plain.sharded_state_dict(metadata=dict(metadata))
    )
    assert set(converted.state_dict()) == set(plain.state_dict())
