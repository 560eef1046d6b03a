"""Pairs of layers that Model-Optimizer is told to distil: asleep, an MTP module has no output to compare.

Under the bypass a pair that names one fails late, with None in place of an output, or compares an output that
an evaluation or an inference left behind. Only the last pipeline stage resolves the pairs to modules, so that
the names are read from the distillation's own configuration, which every rank has.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from torpor.errors import UnsupportedModelError

_ROLES = ("student", "teacher")


def describe_mtp_pair(pairs: Iterable[Sequence[str]], num_layers: tuple[int, int]) -> str | None:
    """Say which pair names an MTP module, and what to name instead; None if no pair does.

    Args:
        pairs: (student layer, teacher layer) or (student layer, teacher layer, loss), qualified names.
        num_layers: How many trunk layers the student and the teacher have.
    """
    for pair in pairs:
        for role, name, count in zip(_ROLES, pair, num_layers, strict=False):
            if "mtp" in name.split("."):
                return (
                    f"the distillation pair {tuple(pair)} names {name} of the {role}: asleep, an MTP module"
                    " does not run and has no output to compare\n"
                    f"  Name a layer of the {role}'s trunk: decoder.layers.{count - 1} is the last one, whose"
                    " output the MTP layers read."
                )
    return None


def refuse_mtp_pairs(chunk: torch.nn.Module) -> None:
    """Refuse a DistillationModel in the chunk that is to distil the output of an MTP module.

    Args:
        chunk: What the user passed to `freeze_mtp`.

    Raises:
        UnsupportedModelError: naming the pair and a trunk layer to use instead; on every rank where
            Model-Optimizer's `adjust_distillation_model_for_mcore` was called, else on the last stage.
    """
    model: Any
    for model in chunk.modules():
        if _is_distillation_model(model):
            problem = describe_mtp_pair(
                [*_configured_pairs(model), *_resolved_pairs(model)],
                (model.config.num_layers, model.teacher_model.config.num_layers),
            )
            if problem is not None:
                raise UnsupportedModelError(problem)


def refuse_mtp_captures(mtp: torch.nn.Module, name: str) -> None:
    """Refuse an MTP block whose output Model-Optimizer captures: it was converted after it fell asleep.

    Args:
        mtp: The block, or a module of it.
        name: Its qualified name.

    Raises:
        UnsupportedModelError: naming the module.
    """
    # Asked in every forward, so in a plain walk: named_modules() takes twice as long.
    for hook in mtp._forward_hooks.values():
        if getattr(hook, "__module__", "").startswith("modelopt.torch.distill"):
            raise UnsupportedModelError(
                f"{name} is in a distillation pair (its output is captured by"
                f" {getattr(hook, '__name__', type(hook).__name__)}): asleep, it does not run and has no"
                " output to compare\n"
                "  Name a layer of the trunk: the last of decoder.layers is the one whose output the MTP"
                " layers read. torpor.modelopt.setup_distillation_config finds such pairs earlier."
            )
    for part, module in mtp._modules.items():
        if module is not None:
            refuse_mtp_captures(module, f"{name}.{part}")


def _is_distillation_model(module: torch.nn.Module) -> bool:
    # There can only be one where its module has been imported.
    modelopt = sys.modules.get("modelopt.torch.distill.distillation_model")
    return modelopt is not None and isinstance(module, modelopt.DistillationModel)


def _configured_pairs(model: Any) -> Iterator[Sequence[str]]:
    """Yield the pairs of the DistillationConfig that the model was adjusted with.

    `adjust_distillation_model_for_mcore` leaves it in the closure of the loss function that it sets
    (modelopt/torch/distill/plugins/megatron.py).
    """
    function = getattr(vars(model).get("compute_language_model_loss"), "__func__", None)
    for cell in getattr(function, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "intermediate_layer_pairs"):
            yield from named_pairs(cell.cell_contents)


def named_pairs(config: Any) -> Iterator[Sequence[str]]:
    """Yield every pair of layer names in a DistillationConfig of Model-Optimizer's Megatron plugin."""
    yield config.logit_layers
    yield from config.intermediate_layer_pairs
    yield from config.criterion or ()


def _resolved_pairs(model: Any) -> Iterator[Sequence[str]]:
    """Yield the pairs that the model captures on this rank, by the names of the modules in it."""
    student = {module: name for name, module in model.named_modules()}
    teacher = {module: name for name, module in model.teacher_model.named_modules()}
    for student_layer, teacher_layer in model._layers_to_loss:
        yield student[student_layer], teacher[teacher_layer]
