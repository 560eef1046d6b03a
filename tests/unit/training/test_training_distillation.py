"""The divergence that is trained on, and that the heads stay out of it."""

import numpy as np
import pytest
import torch

import tiny
import torpor
from torpor.checkpoints.folder import open_folder
from torpor.errors import MTPExecutedError, UnsupportedModelError
from torpor.megatron import graphed_projection
from torpor.megatron.graphed_projection import GraphedProjection, can_be_recorded
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import load_weights
from torpor.training import distillation
from torpor.training.config import OptimizationConfig
from torpor.training.data import PackedWindows
from torpor.training.distillation import build_distillation_model, distillation_objective
from torpor.training.loop import evaluate, prepare_job, run_step
from torpor.training.losses import LossSettings

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


def build(folders, packed, *, frozen=True, mtp=True, dtype="fp32", **loss):
    weights = torch.float32 if dtype == "fp32" else torch.bfloat16
    student, teacher = (load(folders / name, weights, mtp) for name in ("student", "teacher"))
    handles = [torpor.freeze_mtp(model) for model in (student, teacher) if frozen and has_heads(model)]
    model = build_distillation_model(student, teacher)
    settings = OptimizationConfig(**SETTINGS, dtype=dtype)
    objective = distillation_objective(LossSettings(**loss))
    return prepare_job([model], settings, packed, objective, steps=4), handles


def has_heads(model):
    return bool(model.config.mtp_num_layers)


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


def test_the_loss_is_the_divergence_of_the_logits(megatron_rank, folders, packed):
    job, _ = build(folders, packed)
    divergence, _ = expected(folders, job.training_batches(0))
    metrics = run_step(job, 0).metrics
    assert list(metrics) == ["loss"]
    assert metrics["loss"] == pytest.approx(divergence, rel=1e-4)


def test_temperature_and_cross_entropy_are_mixed_in(megatron_rank, folders, packed):
    job, _ = build(folders, packed, temperature=2.0, cross_entropy_weight=0.25)
    divergence, entropy = expected(folders, job.training_batches(0), temperature=2.0)
    metrics = run_step(job, 0).metrics
    assert metrics["divergence"] == pytest.approx(divergence, rel=1e-4)
    assert metrics["cross_entropy"] == pytest.approx(entropy, rel=1e-4)
    assert metrics["loss"] == pytest.approx(0.75 * 4 * divergence + 0.25 * entropy, rel=1e-4)


def test_evaluation_has_the_divergence_and_the_cross_entropy(megatron_rank, folders, packed):
    job, _ = build(folders, packed)
    divergence, entropy = expected(folders, job.held_out_batches(0))
    metrics = evaluate(job, 1)
    assert metrics["loss"] == pytest.approx(divergence, rel=1e-4)
    assert metrics["cross_entropy"] == pytest.approx(entropy, rel=1e-4)


@pytest.mark.parametrize("frozen", [True, False], ids=["asleep", "awake"])
def test_the_step_is_that_of_model_optimizers_own_loss(megatron_rank, folders, packed, frozen):
    """The same model under Model-Optimizer's criterion, which holds all logits, gets the same gradients."""
    from modelopt.torch.distill.plugins import megatron as plugin

    job, _ = build(folders, packed, frozen=frozen)
    ours = gradients_of(job.chunks[0], distillation_objective(LossSettings()).forward_step, job)

    job, _ = build(folders, packed, frozen=frozen)
    model = job.chunks[0].module
    criterion = plugin.LogitsKLLoss(model.config)
    layers = (model.output_layer, model.teacher_model.output_layer)
    model._layers_to_loss = {layers: criterion}
    model._register_hooks()

    def forward_step(batches, wrapped):
        batch = next(batches)
        output = wrapped(
            input_ids=batch.tokens_BS,
            position_ids=batch.positions_BS,
            attention_mask=None,
            labels=batch.labels_BS,
        )
        return output, lambda losses_BS: (
            model.compute_kd_loss(losses_BS.mean(), lambda loss: loss[0].mean())["kd_loss"],
            {},
        )

    theirs = gradients_of(job.chunks[0], forward_step, job)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-6)


def gradients_of(wrapped, forward_step, job):
    wrapped.train()
    wrapped.zero_grad_buffer()
    output, loss = forward_step(job.training_batches(0), wrapped)
    loss(output)[0].backward()
    return {
        n: p.main_grad.clone()
        for n, p in wrapped.module.named_parameters()
        if getattr(p, "main_grad", None) is not None
    }


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


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        ({}, {"hidden": 48, "seed": 1}),
        ({}, {"pattern": "M*-EM*-E", "seed": 1}),
        ({"num_mtp": 0}, {"seed": 1}),
        ({}, {"num_mtp": 0, "seed": 1}),
        ({"num_mtp": 2}, {"num_mtp": 1, "seed": 1}),
        ({}, {"family": "dense", "hidden": 48, "seed": 1}),
        ({"tie_word_embeddings": True}, {"seed": 1}),
    ],
    ids=["wider", "deeper", "student-bare", "teacher-bare", "other-depth", "other-family", "tied-student"],
)
def test_teachers_of_another_kind(megatron_rank, tmp_path, packed, student, teacher):
    for name, options in (("student", student), ("teacher", teacher)):
        options = {"seed": 2, "tokenizer": False, **options}
        WRITERS[options.pop("family", "hybrid")](tmp_path / name, **options)
    job, handles = build(tmp_path, packed)
    divergence, _ = expected(tmp_path, job.training_batches(0))
    first = run_step(job, 0).metrics["loss"]
    assert first == pytest.approx(divergence, rel=1e-4)
    before = evaluate(job, 1)["loss"]
    for step in range(1, 4):
        run_step(job, step)
    assert evaluate(job, 1)["loss"] < before
    for handle in handles:
        assert handle.check(job.optimizer).executions == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["student", "teacher"])
@pytest.mark.parametrize("part", ["embedding", "decoder", "output_layer"])
def test_an_exception_in_either_forward_leaves_no_trace(megatron_rank, tmp_path, packed, place, part, error):
    for name, seed in (("teacher", 1), ("student", 2)):
        tiny.write_mimo(tmp_path / name, seed=seed, tokenizer=False)
    job, handles = build(tmp_path, packed)
    untouched, _ = build(tmp_path, packed)
    for each in (job, untouched):
        run_step(each, 0)  # Megatron's modules set some attributes at their first forward
    meta_model = job.chunks[0].module
    model = meta_model if place == "student" else meta_model.teacher_model

    def fail(*_):
        raise error

    # What every forward sets anew, and Megatron's count of micro-batches.
    counters = ("training", "_lm_loss_call_count", "current_microbatch")

    def snapshot():
        # A tensor among the attributes is an activation that Megatron keeps from the last forward.
        return {
            name: {
                key: value
                for key, value in vars(module).items()
                if key not in counters and not isinstance(value, torch.Tensor)
            }
            for name, module in meta_model.named_modules()
        }

    hook = getattr(model, part).register_forward_pre_hook(fail)
    before = snapshot()
    with pytest.raises(error):
        run_step(job, 1)
    assert snapshot() == before
    hook.remove()
    for handle in handles:
        handle.check()
    assert run_step(job, 1).metrics == run_step(untouched, 1).metrics


def test_no_step_holds_all_logits(megatron_rank, folders, packed, monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    from torpor.training import vocabulary

    class LargestSize(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            is_weight = function is torch.ops.aten.t.default  # transposed, no logits
            if isinstance(result, torch.Tensor) and result.shape[-1:] == (320,) and not is_weight:
                self.rows = max(self.rows, result.numel() // 320)
            return result

    def rows(frozen):
        job, _ = build(folders, packed, frozen=frozen, dtype="bf16")
        with LargestSize() as largest:
            run_step(job, 0)
            evaluate(job, 1)
        return largest.rows

    monkeypatch.setattr(vocabulary, "chunk_size", lambda *_: 4)
    assert rows(frozen=True) == 4
    assert rows(frozen=False) >= 16  # heads that are awake project all tokens: the check can fail


def test_the_teacher_costs_no_graph_and_nothing_of_it_is_kept(megatron_rank, folders, packed):
    import gc
    import weakref

    job, _ = build(folders, packed)
    teacher = job.chunks[0].module.teacher_model
    seen = []
    teacher.output_layer.register_forward_pre_hook(
        lambda module, args: seen.append((args[0].requires_grad, weakref.ref(args[0])))
    )
    run_step(job, 0)
    gc.collect()
    assert len(seen) == 2
    for needs_gradient, states in seen:
        assert not needs_gradient
        assert states() is None


def test_a_quantized_output_layer_is_refused_before_anything_is_changed(megatron_rank, folders):
    student, teacher = load(folders / "student"), load(folders / "teacher")
    teacher.output_layer.weight_quantizer = torch.nn.Identity()
    teacher.output_layer.weight_quantizer.is_enabled = True
    kind = type(student)
    with pytest.raises(UnsupportedModelError, match="output layer is quantized"):
        build_distillation_model(student, teacher)
    assert type(student) is kind


class TestATeacherThatRunsBeforeTheStudent:
    """As from a CUDA graph; without a recording every run is an ordinary one."""

    @pytest.fixture(autouse=True)
    def runs(self, monkeypatch):
        counts = []
        run = GraphedProjection.run
        monkeypatch.setattr(GraphedProjection, "run", lambda *args: counts.append(1) or run(*args))
        monkeypatch.setattr(graphed_projection, "_EAGER_RUNS", 100)
        monkeypatch.setattr(distillation, "can_be_recorded", lambda _: True)
        return counts

    def test_teaches_the_same(self, megatron_rank, folders, packed, monkeypatch, runs):
        job, _ = build(folders, packed)
        records = [run_step(job, step) for step in range(3)]
        assert len(runs) == 6
        monkeypatch.setattr(distillation, "can_be_recorded", lambda _: False)
        job, _ = build(folders, packed)
        beside = [run_step(job, step) for step in range(3)]
        assert len(runs) == 6
        assert [r.metrics for r in records] == [r.metrics for r in beside]
        assert [r.grad_norm for r in records] == [r.grad_norm for r in beside]

    def test_is_whole_again_after_an_exception(self, megatron_rank, folders, packed, monkeypatch):
        job, _ = build(folders, packed)
        model = job.chunks[0].module
        before = dict(vars(model.teacher_model))
        with monkeypatch.context() as patch:
            patch.setattr(model.decoder, "forward", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                run_step(job, 0)
        assert vars(model.teacher_model).get("forward") is before.get("forward")
        assert np.isfinite(run_step(job, 1).metrics["loss"])


def fail(*_, **__):
    raise RuntimeError("out of memory")


def test_nothing_is_recorded_on_the_cpu(megatron_rank, folders):
    assert not can_be_recorded(load(folders / "teacher"))


@pytest.mark.parametrize("does", ["waits", "reads a generator"])
def test_a_forward_that_cannot_be_recorded_is_found_before(megatron_rank, folders, monkeypatch, does):
    """CUDA's own mode finds what waits; on this machine it is played."""
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    graphed = GraphedProjection(load(folders / "teacher"))
    run, real = graphed._run, torch.cuda.random.get_rng_state

    def forward(*inputs):
        if modes and modes[-1] == "error":
            if does == "waits":
                raise RuntimeError("called a synchronizing CUDA operation")
            torch.cuda.random.get_rng_state()
        return run(*inputs)

    monkeypatch.setattr(graphed, "_run", forward)
    monkeypatch.setattr(graphed, "_record", lambda _: pytest.fail("recorded"))
    tokens_BS = torch.arange(16)[None]
    for _ in range(4):
        assert graphed.run(tokens_BS, tokens_BS, tokens_BS).hidden_states_SBH.isfinite().all()
    assert modes == ["error", 0]
    assert torch.cuda.random.get_rng_state is real
