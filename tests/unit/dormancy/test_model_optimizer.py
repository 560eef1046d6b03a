"""Model-Optimizer's distillation in a user's own script: as with models built without MTP, bit for bit."""

import dataclasses
import itertools
import re

import pytest
import torch
import yaml

from distilling import convert, distil_once, reduce_losses
from tiny_models import (
    GPT,
    GPT_TWO_DEPTHS,
    HYBRID,
    HYBRID_MOE,
    batch,
    build,
    build_pair,
    differing,
    gradients,
    same_bytes,
)
from torpor import freeze_mtp
from torpor.dormancy import discovery
from torpor.errors import ConfigError, UnsupportedModelError
from torpor.modelopt import setup_distillation_config

BF16 = {"params_dtype": torch.bfloat16}
NORM = {"gpt": "decoder.final_layernorm", "hybrid": "decoder.final_norm"}
MTP_PAIRS = [
    ("student", ("mtp.layers.0.final_layernorm", "decoder.final_layernorm")),
    ("student", ("mtp", "decoder", "mse")),
    ("teacher", ("decoder.layers.0", "mtp.layers.0.eh_proj", "mse")),
]


@pytest.fixture
def cross_entropies(monkeypatch):
    """The cross-entropies of next-token prediction that are computed, one entry a call."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    calls = []
    original = LanguageModule.compute_language_model_loss

    def counted(self, labels, logits):
        calls.append(type(self).__name__)
        return original(self, labels, logits)

    monkeypatch.setattr(LanguageModule, "compute_language_model_loss", counted)
    return calls


def norm_of(kind):
    return NORM["hybrid" if kind.pattern else "gpt"]


def assert_as_without_mtp(student, teacher, references, **settings):
    """Distil a pair asleep and the pair built without MTP; return what was logged."""
    logged, grads = distil_once(student, teacher, freeze=True, **settings)
    expected, expected_grads = distil_once(*references, freeze=False, **settings)
    assert logged.keys() == expected.keys()
    for name, value in expected.items():
        assert same_bytes(logged[name], value), name
    assert expected_grads
    assert differing(grads, expected_grads) == []
    return logged


@pytest.mark.parametrize("kind", [GPT_TWO_DEPTHS, HYBRID_MOE], ids=str)
@pytest.mark.parametrize(
    ("skip_lm_loss", "logit_kl_topk", "intermediate"),
    itertools.product([True, False], [None, 5], [False, True]),
)
def test_every_loss(kind, skip_lm_loss, logit_kl_topk, intermediate, cross_entropies):
    """Logged values and gradients are those without MTP; the main cross-entropy is computed when it is
    asked for and only then, though Model-Optimizer tells it from MTP's by counting."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    norm = norm_of(kind)
    alike = ("decoder.layers.0", "decoder.layers.3" if kind.pattern else "decoder.layers.1", "mse")
    pairs = [(norm, norm), alike] if intermediate else []
    student, bare_student = build_pair(kind, **BF16)
    teacher, bare_teacher = build_pair(kind, seed=5, **BF16)
    logged = assert_as_without_mtp(
        student,
        teacher,
        (bare_student, bare_teacher),
        skip_lm_loss=skip_lm_loss,
        logit_kl_topk=logit_kl_topk,
        intermediate_layer_pairs=pairs,
    )
    # Once for the pair asleep, once for the reference, never for a teacher.
    assert len(cross_entropies) == (0 if skip_lm_loss else 2)
    assert (logged["lm_loss"].abs().sum() == 0) == skip_lm_loss
    assert (logged["intermediate_loss"] > 0) == intermediate
    assert not MTPLossLoggingHelper.tracker


def test_awake_the_count_of_cross_entropies_is_another(cross_entropies):
    """What the counts above can show: awake, the student's MTP layer has a cross-entropy of its own."""
    distil_once(build(GPT, **BF16), build(GPT, seed=5, **BF16), freeze=False)
    assert len(cross_entropies) == 1


@pytest.mark.parametrize("student_kind", [GPT, HYBRID], ids=str)
@pytest.mark.parametrize("teacher_kind", [GPT, HYBRID], ids=str)
def test_a_teacher_of_another_width_depth_and_family(student_kind, teacher_kind):
    """The hidden states are projected (in FP32, as Model-Optimizer builds it), all is as without MTP."""
    if teacher_kind is HYBRID:
        teacher_kind = dataclasses.replace(HYBRID, pattern="M*-M*-")
        wide = {"hidden_size": 64}
    else:
        wide = {"hidden_size": 64, "num_layers": 3}
    student, bare_student = build_pair(student_kind)
    teacher, bare_teacher = build_pair(teacher_kind, seed=5, **wide)
    torch.manual_seed(7)
    pairs = [(norm_of(student_kind), norm_of(teacher_kind))]
    state = torch.get_rng_state()
    logged, grads = distil_once(student, teacher, freeze=True, intermediate_layer_pairs=pairs)
    torch.set_rng_state(state)  # the projection begins at random
    expected, expected_grads = distil_once(
        bare_student, bare_teacher, freeze=False, intermediate_layer_pairs=pairs
    )
    assert all(same_bytes(logged[name], value) for name, value in expected.items())
    assert any("_loss_modules" in name for name in expected_grads), "a projection is trained"
    assert differing(grads, expected_grads) == []


@pytest.mark.parametrize("with_heads", ["student", "teacher"])
def test_heads_on_one_side_only(with_heads):
    student, bare_student = build_pair(GPT, **BF16)
    teacher, bare_teacher = build_pair(GPT, seed=5, **BF16)
    _, other_teacher = build_pair(GPT, seed=5, **BF16)
    _, other_student = build_pair(GPT, **BF16)
    pair = (student, other_teacher) if with_heads == "student" else (other_student, teacher)
    assert_as_without_mtp(*pair, (bare_student, bare_teacher))


@pytest.mark.parametrize("where", ["student", "teacher"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_either_forward_leaves_no_trace(where, error):
    """The next step is that of models built without MTP, as if nothing had happened."""
    student, bare_student = build_pair(GPT, **BF16)
    teacher, bare_teacher = build_pair(GPT, seed=5, **BF16)
    model = convert(student, teacher)
    handle = freeze_mtp(model)
    configs = [(m.config, dict(vars(m.config))) for m in (student, teacher)]

    def fail(*_):
        raise error

    part = (model if where == "student" else model.teacher_model).decoder
    hook = part.register_forward_pre_hook(fail)
    with pytest.raises(error):
        model(**batch())
    hook.remove()
    for m, (config, fields) in zip((student, teacher), configs, strict=True):
        assert m.config is config
        assert vars(config) == fields
    bare = convert(bare_student, bare_teacher)
    for each in (model, bare):
        reduce_losses(each, each(**batch()))["kd_loss"].backward()
    assert differing(gradients(model), gradients(bare)) == []
    assert handle.check().executions == 0


# --- pairs that name an MTP module ----------------------------------------------------------------------


def distillation_config(**settings):
    from modelopt.torch.distill.plugins.megatron import DistillationConfig

    return DistillationConfig(**settings)


@pytest.mark.parametrize(("role", "pair"), MTP_PAIRS)
@pytest.mark.parametrize("as_file", [False, True])
def test_a_pair_that_names_mtp_is_refused_when_the_config_is_made(role, pair, as_file, tmp_path):
    student, teacher = build(GPT), build(GPT, seed=5, num_layers=3)
    good = ("decoder.layers.0", "decoder.layers.1", "mse")
    if as_file:
        config = tmp_path / "distill.yaml"
        config.write_text(yaml.safe_dump({"intermediate_layer_pairs": [list(good), list(pair)]}))
        config = str(config)
    else:
        config = distillation_config(intermediate_layer_pairs=[good, pair])
    with pytest.raises(ConfigError) as refusal:
        setup_distillation_config(config, student.config, teacher.config)
    message = str(refusal.value)
    assert str(pair) in message
    assert f"of the {role}" in message
    assert f"decoder.layers.{1 if role == 'student' else 2} " in message
    if not as_file:
        assert config.criterion is None, "refused before Model-Optimizer filled it in"


def test_the_trunk_layer_that_the_refusal_names_works():
    """Following the advice of the message leads to a distillation."""
    student, bare_student = build_pair(GPT, **BF16)
    teacher, bare_teacher = build_pair(GPT, seed=5, num_layers=3, **BF16)
    pairs = [("decoder.layers.1", "decoder.layers.2", "mse")]
    references = (bare_student, bare_teacher)
    assert_as_without_mtp(student, teacher, references, intermediate_layer_pairs=pairs)


@pytest.mark.parametrize("settings", [{"logit_layers": ("mtp", "output_layer")}, {"criterion": True}])
def test_logit_layers_and_a_criterion_of_ones_own_are_looked_at_too(settings):
    if "criterion" in settings:
        settings = {"criterion": {("output_layer", "mtp.layers.0"): torch.nn.MSELoss()}}
    config = build(GPT).config
    with pytest.raises(ConfigError, match="mtp"):
        setup_distillation_config(distillation_config(**settings), config, config)


def test_a_module_whose_name_only_contains_the_letters_is_no_mtp_module():
    config = build(GPT).config
    pairs = [("decoder.mtp_like", "decoder.layers.0")]
    setup_distillation_config(distillation_config(intermediate_layer_pairs=pairs), config, config)


def test_without_a_config_model_optimizers_default_is_made():
    config = build(GPT).config
    made = setup_distillation_config(None, config, config)
    assert list(made.criterion) == [("output_layer", "output_layer")]
    assert made.skip_lm_loss


@pytest.fixture
def unchecked(monkeypatch):
    """`distilling.convert` with Model-Optimizer's own function, which accepts such pairs."""
    from modelopt.torch.distill.plugins import megatron

    monkeypatch.setattr("distilling.setup_distillation_config", megatron.setup_distillation_config)


@pytest.mark.parametrize(("role", "pair"), MTP_PAIRS)
def test_freeze_mtp_refuses_a_model_that_is_to_distil_mtp(role, pair, unchecked):
    """A script that has not asked is refused by its one line, before anything is changed."""
    model = convert(build(GPT), build(GPT, seed=5), intermediate_layer_pairs=[pair])
    with pytest.raises(UnsupportedModelError, match=f"of the {role}.*\n.*decoder.layers.1"):
        freeze_mtp(model)
    assert all(p.requires_grad for p in model.mtp.parameters())
    assert "_call_impl" not in vars(model)


def test_freeze_mtp_refuses_what_was_converted_without_model_optimizers_megatron_plugin():
    """There is no configuration to read: the modules that are captured tell."""
    import modelopt.torch.distill as mtd

    mode = {
        "teacher_model": build(GPT, seed=5),
        "criterion": {("decoder", "mtp.layers.0.enorm"): torch.nn.MSELoss()},
        "loss_balancer": None,
    }
    model = mtd.convert(build(GPT), mode=[("kd_loss", mode)])
    with pytest.raises(UnsupportedModelError, match=r"mtp\.layers\.0\.enorm of the teacher"):
        freeze_mtp(model)


@pytest.mark.parametrize(("role", "pair"), MTP_PAIRS)
def test_converted_after_it_fell_asleep_it_is_refused_in_its_first_forward(role, pair, unchecked):
    student, teacher = build(GPT), build(GPT, seed=5)
    handles = [freeze_mtp(student), freeze_mtp(teacher)]
    model = convert(student, teacher, intermediate_layer_pairs=[pair])
    name = re.escape(pair[role == "teacher"])
    with pytest.raises(UnsupportedModelError, match=rf"^{name} is in a distillation pair"):
        model(**batch())
    assert [handle.executions for handle in handles] == [0, 0]
    assert model.config.mtp_num_layers == 1, "the config is not left in its sleeping form"


def test_sabotage_without_the_check_such_a_pair_fails_late(unchecked, monkeypatch):
    """What the refusal is for: under the bypass the captured output is missing when losses are reduced."""
    monkeypatch.setattr(discovery, "refuse_mtp_pairs", lambda chunk: None)
    monkeypatch.setattr("torpor.dormancy.bypass.refuse_mtp_captures", lambda mtp, name: None)
    model = convert(build(GPT), build(GPT, seed=5), intermediate_layer_pairs=[("mtp", "decoder", "mse")])
    freeze_mtp(model)
    lm_losses_BS = model(**batch())
    with pytest.raises(AttributeError):
        reduce_losses(model, lm_losses_BS)
