"""A smaller model from a larger one by leaving out layers, without an engine."""

import re
from collections.abc import Sequence
from pathlib import Path

from torpor.checkpoints.folder import Folder, FolderWriter
from torpor.errors import ConfigError, UnsupportedModelError

LAYER = re.compile(r"backbone\.layers\.(\d+)\.(.+)")


def drop_layers(source: Folder, kept: Sequence[int], out: Path) -> None:
    """Write `source` with only some of its trunk layers; every tensor that stays keeps its bytes.

    MTP layers, embedding, final norm and output layer all stay. Layers are renumbered from 0.

    Args:
        source: A `nemotron_h` folder whose config has `hybrid_override_pattern`.
        kept: Numbers of the trunk layers to keep, ascending.
        out: Folder to write; must not exist.

    Raises:
        UnsupportedModelError: The source is of another family.
        ConfigError: `kept` is empty, not ascending, or names a layer that is not there.
    """
    pattern = source.config.get("hybrid_override_pattern")
    if source.config.get("model_type") != "nemotron_h" or not pattern:
        raise UnsupportedModelError(
            f"{source.path} has model_type {source.config.get('model_type')!r}; layers can be dropped from"
            " nemotron_h folders whose config.json has hybrid_override_pattern"
        )
    if not kept or list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < len(pattern):
        raise ConfigError(
            f"layers to keep are {list(kept)}\n"
            f"  {source.path} needs ascending numbers from 0 to {len(pattern) - 1}."
        )
    config = dict(source.config)
    config["hybrid_override_pattern"] = "".join(pattern[number] for number in kept)
    config["num_hidden_layers"] = len(kept)
    renumbered = {old: new for new, old in enumerate(kept)}
    with FolderWriter(out, like=source, config=config) as writer:
        for name, entry in source.tensors.items():
            match = LAYER.fullmatch(name)
            if match and int(match[1]) not in renumbered:
                continue
            new = f"backbone.layers.{renumbered[int(match[1])]}.{match[2]}" if match else name
            writer.add(new, entry.dtype, entry.shape, source.read_bytes(name))
