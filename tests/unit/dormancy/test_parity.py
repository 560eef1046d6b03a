"""Dormant equals built-without-MTP, bit for bit: outputs, trunk gradients, what is saved for backward."""

from types import SimpleNamespace

import pytest
import torch

from parity import FULL_RECOMPUTE, run
from tiny_models import (
    GPT,
    GPT_TIED,
    HYBRID,
    HYBRID_MOE,
    KINDS,
    SEQUENCE,
    batch,
    build_pair,
    differing,
    gradients,
    same_bytes,
)
from torpor import freeze_mtp

pytestmark = pytest.mark.usefixtures("megatron_rank")

RECOMPUTE = pytest.mark.parametrize("recompute", [{}, FULL_RECOMPUTE], ids=["no-recompute", "full-recompute"])


@RECOMPUTE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_outputs_and_gradients_equal_those_of_a_model_without_mtp(kind, dtype, recompute):
    """The definition of dormancy: the trunk cannot tell that the heads are there."""
    dormant, reference = build_pair(kind, params_dtype=dtype, **recompute)
    freeze_mtp(dormant)
    output, grads = run(dormant)
    expected, expected_grads = run(reference)
    assert same_bytes(output, expected)
    assert differing(grads, expected_grads) == []


@pytest.mark.parametrize("kind", [GPT, GPT_TIED, HYBRID, HYBRID_MOE], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_dormancy_does_not_depend_on_labels_or_mode(kind, training):
    """Without labels upstream derives them from the inputs and trains MTP all the same."""
    dormant, reference = build_pair(kind)
    freeze_mtp(dormant)
    output, grads = run(dormant.train(training), labels=None)
    expected, expected_grads = run(reference.train(training), labels=None)
    assert output.shape[1] == SEQUENCE
    assert same_bytes(output, expected)
    assert differing(grads, expected_grads) == []


@pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
def test_a_loss_mask_is_used_as_given(kind):
    """Masking is the trunk's business: dormancy neither shifts nor drops the mask."""
    mask = (torch.arange(SEQUENCE) > 4).float().expand(2, -1).contiguous()
    dormant, reference = build_pair(kind)
    freeze_mtp(dormant)
    output, grads = run(dormant, loss_mask=mask)
    expected, expected_grads = run(reference, loss_mask=mask)
    assert same_bytes(output, expected)
    assert differing(grads, expected_grads) == []


@RECOMPUTE
@pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
def test_nothing_of_mtp_is_saved_or_projected(kind, recompute):
    """What autograd keeps is byte for byte as much as without MTP, and the vocabulary is projected once."""

    def saved_bytes_and_projections(model):
        saved, projections = [], []
        hook = model.output_layer.register_forward_hook(lambda *_: projections.append(1))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
            model(**batch())
        hook.remove()
        return sum(saved), len(saved), len(projections)

    dormant, reference = build_pair(kind, **recompute)
    awake = saved_bytes_and_projections(dormant)
    freeze_mtp(dormant)
    expected = saved_bytes_and_projections(reference)
    assert saved_bytes_and_projections(dormant) == expected
    assert awake[0] > expected[0]
    assert awake[2] == 2


class TestWrongBypasses:
    """Half measures that others ship: the parity comparison above must tell each from the right thing."""

    @pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
    def test_freezing_alone_is_caught(self, kind):
        """Frozen MTP that still runs sends its loss into the trunk's gradients."""
        frozen, reference = build_pair(kind)
        frozen.mtp.requires_grad_(False)
        _, grads = run(frozen)
        _, expected_grads = run(reference)
        assert differing(grads, expected_grads) != []

    def test_skipping_the_block_but_not_its_loss_is_caught(self):
        """The loss stage then cuts the trunk's own hidden states in two, without an error."""
        skipping, reference = build_pair(GPT)
        skipping.mtp.forward = lambda *args, hidden_states, **kwargs: hidden_states
        ids, positions = batch()["input_ids"], batch()["position_ids"]
        embedded = reference.embedding(ids, positions).detach()
        output, _ = run(skipping, labels=None, input_ids=None, decoder_input=embedded)
        expected, _ = run(reference, labels=None, input_ids=None, decoder_input=embedded)
        assert output.shape[1] == SEQUENCE // 2
        assert expected.shape[1] == SEQUENCE

    def test_a_zero_loss_scale_still_executes(self):
        """The usual advice: mtp_loss_scaling_factor=0. The block and its projection run all the same."""
        model, _ = build_pair(GPT, mtp_loss_scaling_factor=0.0)
        ran = []
        model.mtp.layers[0].register_forward_hook(lambda *_: ran.append(1))
        run(model)
        assert ran == [1]


@pytest.mark.parametrize("kind", [GPT, HYBRID_MOE], ids=str)
def test_without_the_call_nothing_changes(kind):
    """A model that nobody froze runs its heads, also beside one that is frozen."""
    frozen, _ = build_pair(kind)
    free, _ = build_pair(kind)
    before, grads_before = run(free)
    grads_before = {n: g.clone() for n, g in grads_before.items()}
    assert any(n.startswith("mtp.") for n in grads_before)
    freeze_mtp(frozen)
    run(frozen)
    free.zero_grad()
    after, grads_after = run(free)
    assert same_bytes(before, after)
    assert differing(grads_before, grads_after) == []


def test_inference_and_speculative_decoding_are_untouched():
    """Under InferenceMode a dormant model does what it did before: the heads draft tokens."""
    from megatron.core.inference.utils import InferenceMode

    model, _ = build_pair(GPT)
    model.eval()
    inputs = batch() | {"labels": None, "runtime_gather_output": True}
    hidden = torch.randn(4, 1, 32, generator=torch.Generator().manual_seed(0)).to(inputs["input_ids"].device)
    tokens = inputs["input_ids"][:1, :4]
    draft = {
        "hidden_states": hidden,
        "next_token_ids": tokens,
        "position_ids": inputs["position_ids"][:1, :4],
    }

    def infer():
        seen = []
        hook = model.decoder.register_forward_hook(lambda *_: seen.append(model.config.mtp_num_layers))
        with InferenceMode.active(), torch.no_grad():
            logits = model(**inputs)
            drafted = model.compute_mtp_single_step(**draft, depth=0)
        hook.remove()
        assert seen == [1]
        return [logits.clone(), *[t.clone() for t in drafted]]

    before = infer()
    handle = freeze_mtp(model)
    after = infer()
    assert all(same_bytes(a, b) for a, b in zip(before, after, strict=True))
    assert handle.executions == 0


@pytest.mark.parametrize("order", ["freeze-first", "convert-first"])
@pytest.mark.parametrize("skip_lm_loss", [True, False])
def test_model_optimizers_distillation(order, skip_lm_loss):
    """Student and teacher sleep inside a DistillationModel, whichever is done first, and the main loss
    is taken for what it is: skipped when it should be skipped, computed when not."""
    import modelopt.torch.distill as mtd
    import modelopt.torch.distill.plugins.megatron as mtd_megatron

    def distil(student, teacher, freeze):
        config = mtd_megatron.DistillationConfig(skip_lm_loss=skip_lm_loss)
        config = mtd_megatron.setup_distillation_config(config, student.config, teacher.config)
        if freeze and order == "freeze-first":
            handles = [freeze_mtp(student), freeze_mtp(teacher)]
        mode = {
            "teacher_model": teacher,
            "criterion": config.criterion,
            "loss_balancer": config.loss_balancer,
        }
        model = mtd.convert(student, mode=[("kd_loss", mode)])
        mtd_megatron.adjust_distillation_model_for_mcore(model, config)
        if freeze and order == "convert-first":
            handles = [freeze_mtp(model)]
        model.train()
        lm_loss = model(**batch())
        losses = model.compute_kd_loss(
            student_loss=lm_loss.float().mean(), loss_reduction_fn=lambda loss: loss[0].float().mean()
        )
        losses["kd_loss"].backward()
        grads = {n: g for n, g in gradients(model).items() if not n.startswith("_teacher")}
        if freeze:
            for handle in handles:
                assert handle.check().executions == 0
            assert sum(handle.check().num_tensors for handle in handles) == 2 * num_retained
        return lm_loss, losses, grads

    student, bare_student = build_pair(GPT, params_dtype=torch.bfloat16)
    num_retained = len(list(student.mtp.parameters()))
    teacher, bare_teacher = build_pair(GPT, params_dtype=torch.bfloat16, seed=5)
    lm_loss, losses, grads = distil(student, teacher, freeze=True)
    expected_lm_loss, expected, expected_grads = distil(bare_student, bare_teacher, freeze=False)
    assert same_bytes(lm_loss, expected_lm_loss)
    assert (lm_loss.abs().sum() == 0) == skip_lm_loss
    for name in expected:
        assert same_bytes(losses[name], expected[name])
    assert differing(grads, expected_grads) == []


def test_a_config_that_mirrors_writes_is_not_written_to():
    """Megatron-Bridge's distillation provider is the config and copies attribute writes to the teacher's."""
    model, _ = build_pair(GPT)
    mirror = SimpleNamespace(mtp_num_layers=1)

    class MirroringConfig(type(model.config)):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            setattr(mirror, name, value)

    model.config.__class__ = MirroringConfig
    freeze_mtp(model)
    run(model)
    assert mirror.mtp_num_layers == 1
    assert not hasattr(mirror, "hidden_size")
