"""A user's own distillation script over pipeline stages and a split vocabulary: as without MTP."""

import dataclasses
from typing import Any

import torch

from distilling import convert, reduce_losses
from ranks.launch import run_ranks
from tiny_models import GPT, HYBRID, SEQUENCE, batch, build, build_pair, differing, gradients
from torpor import freeze_mtp
from torpor.errors import ConfigError, UnsupportedModelError
from torpor.megatron import parallel
from torpor.megatron.parallel import Layout

NORM_PAIR = ("decoder.final_layernorm", "decoder.final_layernorm")
SETTINGS: dict[str, dict[str, Any]] = {
    "logits": {},
    "top-k": {"logit_kl_topk": 40},  # more than a rank's share of the vocabulary of 64 at TP2
    "intermediate": {"intermediate_layer_pairs": [NORM_PAIR]},
    "with cross-entropy": {"skip_lm_loss": False},
}
TWO_STAGES = Layout(pipeline=2)
SPLIT = Layout(tensor=2, sequence_parallel=True)
HYBRID_STAGES = dataclasses.replace(HYBRID, pattern="M*|-M")


def train_step(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Run two micro-batches through Megatron's own schedule; what is logged, on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from modelopt.torch.distill.plugins.megatron import get_tensor_shapes_adjust_fn_for_distillation

    def step(batches, model):
        return model(**next(batches)), lambda losses_BS: reduce(losses_BS)

    def reduce(losses_BS):
        losses = reduce_losses(model, losses_BS)
        # Logged before the schedule divides the loss in place.
        logged = {name: value.detach().clone() for name, value in losses.items()}
        return losses["kd_loss"], logged | {"lm_loss": losses_BS.detach().clone()}

    shapes = {"seq_length": SEQUENCE, "micro_batch_size": 2, "decoder_seq_length": None}
    reports = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([batch(seed), batch(seed + 1)]),
        model=model,
        num_microbatches=2,
        seq_length=SEQUENCE,
        micro_batch_size=2,
        forward_only=False,
        adjust_tensor_shapes_fn=get_tensor_shapes_adjust_fn_for_distillation(model, **shapes),
    )
    return {f"{i}.{name}": value for i, report in enumerate(reports) for name, value in report.items()}


def check_as_without_mtp(layout: Layout) -> list[str]:
    """Compare one step asleep with one of models built without MTP, for every loss; what differs."""
    parallel.initialize(layout, seed=11)
    wrong = []
    options = {"params_dtype": torch.bfloat16, "sequence_parallel": layout.sequence_parallel}
    runs = [(GPT, GPT, {"num_layers": 4}, name) for name in SETTINGS]
    kind = HYBRID_STAGES if layout.pipeline == 2 else HYBRID
    runs += [(kind, GPT, {"num_layers": 4, "hidden_size": 64}, "logits")]  # another width and family
    for student_kind, teacher_kind, teacher_overrides, name in runs:
        depth = {} if student_kind.pattern else {"num_layers": 4}
        student, bare_student = build_pair(student_kind, **depth, **options)
        teacher, bare_teacher = build_pair(teacher_kind, seed=5, **teacher_overrides, **options)
        asleep = convert(student, teacher, **SETTINGS[name])
        handle = freeze_mtp(asleep)
        logged = train_step(asleep, seed=3)
        bare = convert(bare_student, bare_teacher, **SETTINGS[name])
        expected = train_step(bare, seed=3)
        # A tied stage with MTP has a duplicate of the embedding, which receives zeros.
        grads = {n: g for n, g in gradients(asleep).items() if n in gradients(bare)}
        wrong += [f"{name}: {n}" for n in differing(logged, expected)]
        wrong += [f"{name}: gradient of {n}" for n in differing(grads, gradients(bare))]
        if not grads or handle.check().executions:
            wrong.append(f"{name}: nothing was compared")
        if (name == "with cross-entropy") != any(
            v.abs().sum() > 0 for n, v in logged.items() if n.endswith("lm_loss")
        ) and logged:
            wrong.append(f"{name}: the cross-entropy is skipped when it should not be, or the reverse")
    parallel.shutdown()
    return wrong


def refusals_of_mtp_pairs() -> list[str]:
    """How a pair with an MTP module is refused on this stage, by the config and by `freeze_mtp`."""
    parallel.initialize(TWO_STAGES, seed=11)
    messages = []
    try:
        convert(build(GPT), build(GPT, seed=5), intermediate_layer_pairs=[("mtp", "decoder", "mse")])
    except ConfigError as error:
        messages.append(str(error))
    from modelopt.torch.distill.plugins import megatron

    import distilling

    distilling.setup_distillation_config = megatron.setup_distillation_config
    model = convert(build(GPT), build(GPT, seed=5), intermediate_layer_pairs=[("mtp", "decoder", "mse")])
    try:
        freeze_mtp(model)
    except UnsupportedModelError as error:
        messages.append(str(error))
    parallel.shutdown()
    return messages


def check(_: None) -> tuple[list[str], list[str], list[str]]:
    return check_as_without_mtp(TWO_STAGES), check_as_without_mtp(SPLIT), refusals_of_mtp_pairs()


def test_two_stages_and_two_tensor_ranks():
    """One start: PP2 with its adjusted tensor shapes, TP2 with sequence parallelism, refusals."""
    first, last = run_ranks(check, 2, None)
    for stages, split, _ in (first, last):
        assert stages == []
        assert split == []
    # Every stage refuses, though only the last one would resolve the pair to modules.
    assert first[2] == last[2]
    assert len(first[2]) == 2
    assert all("('mtp', 'decoder', 'mse')" in message for message in first[2])
