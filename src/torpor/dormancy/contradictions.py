"""States of a model that contradict putting its MTP layers to sleep: refused before anything is changed."""

import gc
import re
from collections.abc import Iterator
from typing import Any, Final

import torch

from torpor.errors import UnsupportedModelError

NEXT_STEP: Final = (
    "Call freeze_mtp on the bare model, after its weights are loaded and before DDP and the optimizer."
)
# Settings under which a trainer trains the heads and nothing else.
_TRAINS_ONLY_MTP: Final = ("freeze_base_model_for_mtp", "freeze_base_for_mtp")
# Parts of names that PEFT, Megatron-Bridge and Megatron-LM give to adapters and their parameters.
_ADAPTER_NAME: Final = re.compile(r"(^|[._])(lora|dora|ia3|adapters?)([._]|$)", re.IGNORECASE)
_ADAPTER_CLASS: Final = re.compile(r"lora|dora|adapter", re.IGNORECASE)


def refuse_contradictions(model: Any, mtp: torch.nn.Module, name: str) -> None:
    """Refuse a language model whose MTP layers are meant to be trained, or are held by what trains them.

    Args:
        model: The language model.
        mtp: Its MTP block.
        name: What to call the model in messages.

    Raises:
        UnsupportedModelError: naming what contradicts.
    """
    for field in _TRAINS_ONLY_MTP:
        if getattr(model.config, field, False):
            raise UnsupportedModelError(
                f"{name} has config.{field}=True: it trains the MTP layers that freeze_mtp puts to sleep\n"
                f"  Set it to False, or leave freeze_mtp out."
            )
    _refuse_meta(mtp, name)
    _refuse_adapters(mtp, name)
    _refuse_partly_frozen(mtp, name)
    _refuse_nothing_left_to_train(model, mtp, name)
    _refuse_built_optimizer(mtp, name)


def _refuse_meta(mtp: torch.nn.Module, name: str) -> None:
    for n, t in [*mtp.named_parameters(), *mtp.named_buffers()]:
        if t.is_meta:
            raise UnsupportedModelError(
                f"{name}.mtp.{n} is on the meta device: it has no bytes to retain\n  {NEXT_STEP}"
            )


def _refuse_adapters(mtp: torch.nn.Module, name: str) -> None:
    adapters = {
        n: type(m).__name__ for n, m in mtp.named_modules() if _ADAPTER_CLASS.search(type(m).__name__)
    }
    for n, p in mtp.named_parameters():
        owner = next((kind for prefix, kind in adapters.items() if n.startswith(f"{prefix}.")), None)
        if p.requires_grad and (owner or _ADAPTER_NAME.search(n)):
            raise UnsupportedModelError(
                f"{name}.mtp.{n} is a trainable adapter{f' ({owner})' if owner else ''} inside MTP:"
                " asleep, it would never be trained\n"
                "  Exclude MTP from the adapter's targets: match `decoder.` rather than suffixes of names."
            )


def _refuse_partly_frozen(mtp: torch.nn.Module, name: str) -> None:
    parameters = dict(mtp.named_parameters())
    frozen = sorted(n for n, p in parameters.items() if not p.requires_grad)
    if 0 < len(frozen) < len(parameters):
        raise UnsupportedModelError(
            f"{name}.mtp is partly frozen already: {len(frozen)} of {len(parameters)} parameters,"
            f" the first {frozen[0]}\n  Freeze all of them or none before freeze_mtp."
        )


def _refuse_nothing_left_to_train(model: Any, mtp: torch.nn.Module, name: str) -> None:
    """Refuse a frozen trunk with trainable MTP; with both frozen the model is a teacher or a reference."""
    inside = {id(p) for p in mtp.parameters()}
    trunk = [p for p in model.parameters() if id(p) not in inside]
    if trunk and not any(p.requires_grad for p in trunk) and any(p.requires_grad for p in mtp.parameters()):
        raise UnsupportedModelError(
            f"{name}: all {len(trunk)} trunk parameters are frozen and MTP is not: with MTP asleep nothing is"
            " left to train\n  Unfreeze what is to be trained, or leave freeze_mtp out to train the heads."
        )


def _refuse_built_optimizer(mtp: torch.nn.Module, name: str) -> None:
    for n, p in mtp.named_parameters():
        if hasattr(p, "main_grad") or hasattr(p, "main_param"):
            raise UnsupportedModelError(
                f"{name}.mtp.{n} already belongs to a DDP buffer or an optimizer\n  {NEXT_STEP}"
            )
    parameters = {id(p): n for n, p in mtp.named_parameters()}
    if next(_held_by_torch_optimizers(parameters), None) is None:
        return
    # An optimizer that was dropped but sits in a reference cycle is no obstacle.
    gc.collect()
    for optimizer, held in _held_by_torch_optimizers(parameters):
        raise UnsupportedModelError(
            f"{name}.mtp.{held} already belongs to an optimizer, {optimizer}\n  {NEXT_STEP}"
        )


def _held_by_torch_optimizers(parameters: dict[int, str]) -> Iterator[tuple[str, str]]:
    """Yield the class name of each living torch optimizer that has one of the parameters, and which one."""
    kinds = set(_subclasses(torch.optim.Optimizer))
    candidates = gc.get_objects()
    # Half a million objects: where there is no optimizer at all, C finds that out.
    if kinds.isdisjoint(map(type, candidates)):
        return
    for candidate in candidates:
        if type(candidate) in kinds:
            for group in getattr(candidate, "param_groups", ()):
                for p in group["params"]:
                    if id(p) in parameters:
                        yield type(candidate).__name__, parameters[id(p)]


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
