"""Which layers of a model an adapter's `target_modules` name, in a checkpoint's words or in Megatron's."""

import re
from collections.abc import Sequence
from typing import Literal

from torpor.checkpoints.name_map import NameMap
from torpor.errors import ConfigError

# Linear layers of a decoder layer that take an adapter. Routed experts, routers and convolutions do not.
_ADAPTABLE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "mixer.in_proj",
    "mixer.out_proj",
)
_MEGATRON_NAME = re.compile(r"decoder\.layers\.\d+\.(.+?)\.weight(\..+)?")


def find_lora_targets(name_map: NameMap, target_modules: Sequence[str] | Literal["all-linear"]) -> list[str]:
    """Find the layers that names stand for, the same in every decoder layer.

    As in PEFT a name stands for every layer whose path is it or ends in it after a dot. MTP layers, routed
    experts, embedding and output layer are never among them. A layer that Megatron fuses out of several takes
    one adapter, so all of its parts have to be named.

    Args:
        name_map: The map of the model.
        target_modules: Paths or ends of paths, of the checkpoint or of Megatron; or "all-linear".

    Returns:
        Paths within a decoder layer, such as "self_attention.linear_qkv".

    Raises:
        ConfigError: A name stands for no such layer, or for a part of a fused one.
    """
    parts = _find_parts(name_map)
    if target_modules == "all-linear":
        return list(parts)
    named: dict[str, set[str]] = {}
    for target in target_modules:
        matched = False
        for path, hf_names in parts.items():
            hit = (
                hf_names if _ends_in(path, target) else {name for name in hf_names if _ends_in(name, target)}
            )
            if hit:
                named.setdefault(path, set()).update(hit)
                matched = True
        if not matched:
            raise ConfigError(_explain_unknown(target, name_map, parts))
    for path, hf_names in named.items():
        if missing := sorted(parts[path] - hf_names):
            raise ConfigError(
                f"`lora.target_modules` names a part of {path}, which also is {missing[0]}\n"
                f"  Name all its parts ({', '.join(_last_words(parts[path]))}), or {path.split('.')[-1]}."
            )
    return [path for path in parts if path in named]


def is_target(megatron_name: str, targets: Sequence[str]) -> bool:
    """Say whether a Megatron tensor, by its name in a checkpoint, is the weight of an adapted layer."""
    match = _MEGATRON_NAME.fullmatch(megatron_name)
    return match is not None and match[1] in targets


def _find_parts(name_map: NameMap) -> dict[str, set[str]]:
    """Paths of the adaptable layers of this model, and the checkpoint's layers that each consists of."""
    parts: dict[str, set[str]] = {}
    for entry in name_map.entries:
        for name in entry.megatron_names:
            match = _MEGATRON_NAME.fullmatch(name)
            if match and match[1] in _ADAPTABLE:
                parts.setdefault(match[1], set()).update(_module(name) for name in entry.hf_names)
    return {path: parts[path] for path in _ADAPTABLE if path in parts}


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _ends_in(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _last_words(names: set[str]) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in names})


def _explain_unknown(target: str, name_map: NameMap, parts: dict[str, set[str]]) -> str:
    modules = {
        _module(name)
        for entry in name_map.entries
        for name in (*entry.megatron_names, *entry.hf_names)
        if _ends_in(_module(name), target)
    }
    known = sorted(
        {path.rsplit(".", 1)[-1] for path in parts} | {w for p in parts.values() for w in _last_words(p)}
    )
    what = "names no layer of this model"
    if modules:
        what = (
            f"names {sorted(modules)[0]}, which takes no adapter (MTP, experts, embeddings, norms, routers)"
        )
    return (
        f"`lora.target_modules`: {target!r} {what}\n  Name some of {', '.join(known)}; or write all-linear"
        " in place of the list."
    )
