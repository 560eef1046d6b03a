"""A tuned folder's configuration, made to describe the MTP layers that are put back into it."""

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from torpor.checkpoints.config_fields import NESTED, Config, text_config
from torpor.checkpoints.family import Family
from torpor.checkpoints.folder import Folder
from torpor.checkpoints.inspect import MODELOPT_NAME, modules_to_exclude, quantization_configs
from torpor.checkpoints.quantization import QUANTIZATION_FIELDS, exclude, find_quantization, not_excluded


def mend_config(source: Config, tuned: Config, family: Family) -> tuple[dict[str, Any], list[str]]:
    """Return the tuned configuration with everything that describes the heads as in the source's.

    Trainers leave the count out, rename it, or leave out what the layers look like.

    Args:
        source: The configuration that the heads come with.
        tuned: The one that they were lost from.
        family: The models' family.

    Returns:
        The mended configuration, and the fields that differ.
    """
    before = {**text_config(source)}
    if text_config(source) is not source:
        # Some models say it outside the language model's part.
        before = {**{k: v for k, v in source.items() if k in family.declared_by}, **before}
    about = {*family.declared_by, *family.described_by}
    about |= {name for name in before if "mtp" in name or "nextn" in name}
    changes: list[str] = []

    def mend(part: Config, is_text: bool) -> dict[str, Any]:
        mended = {name: value for name, value in part.items() if name not in family.declared_by}
        if is_text:
            for name in sorted(about & before.keys()):
                mended[name] = before[name]
            # The same thing in other words would contradict it.
            for name in family.described_by:
                if name not in before and any(other in before for other in family.described_by):
                    mended.pop(name, None)
        changes.extend(
            sorted(name for name in mended.keys() | part.keys() if mended.get(name) != part.get(name))
        )
        return mended

    return _map_text_config(tuned, mend), changes


def _map_text_config(config: Config, change: Callable[[Config, bool], dict[str, Any]]) -> dict[str, Any]:
    """Return a configuration with a change made to the language model's part and to what it is nested in."""
    nested = next((field for field in NESTED if isinstance(config.get(field), dict)), None)
    changed = change(config, nested is None)
    if nested is not None:
        changed[nested] = _map_text_config(config[nested], change)
    return changed


def exclude_heads(merged: Folder, family: Family) -> tuple[Folder, dict[str, bytes], list[str]]:
    """Make the quantisation configurations leave plain heads alone.

    Args:
        merged: The tuned folder as it will be with the heads.
        family: Its family.

    Returns:
        The folder with its configuration mended, what other files shall hold, and what was changed.

    Raises:
        UnsupportedModelError: A way of quantising that we do not know.
    """
    mtp, trunk = family.sort(merged.tensors, merged.config)
    configs = quantization_configs(merged)
    modules = modules_to_exclude(merged, family, mtp, trunk) if configs else []
    prefixes = family.mtp_prefixes(mtp, trunk, merged.config)
    changes: list[str] = []
    contents: dict[str, bytes] = {}
    for file, quantization in configs.items():
        if not not_excluded(quantization, modules):
            continue
        changes.append(f"{file}: {len(modules)} MTP modules excluded from quantisation")
        if file == MODELOPT_NAME:
            companion = next(path for path in merged.companions if path.name == file)
            whole = json.loads(companion.read_bytes())
            mended = _replace_quantization(whole, modules, prefixes)
            contents[file] = (json.dumps(mended, indent=2) + "\n").encode()
        else:
            config = _map_text_config(
                merged.config, lambda part, _: _replace_quantization(part, modules, prefixes)
            )
            merged = replace(merged, config=config)
    return merged, contents, changes


def _replace_quantization(
    config: Config, modules: Collection[str], prefixes: Collection[str]
) -> dict[str, Any]:
    quantization = find_quantization(config)
    if quantization is None:
        return dict(config)
    field = next(field for field in QUANTIZATION_FIELDS if config.get(field) is quantization)
    return {**config, field: exclude(quantization, modules, prefixes)}
