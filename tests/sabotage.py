"""Exports that are wrong in one way each, made from a sound folder."""

import json
from collections.abc import Callable
from pathlib import Path

from torpor.checkpoints.folder import FolderWriter, open_folder

# name, dtype, shape, bytes -> what is written instead, or nothing
Tensor = tuple[str, str, tuple[int, ...], bytes]
Change = Callable[[Tensor], Tensor | None]


def write_changed(
    source: Path,
    out: Path,
    change: Change = lambda tensor: tensor,
    add: tuple[Tensor, ...] = (),
    config: dict | None = None,
) -> Path:
    """Write a copy of a folder with some tensors changed, dropped or added, or other configuration fields."""
    folder = open_folder(source)
    new_config = {**folder.config, **config} if config else None
    with FolderWriter(out, like=folder, config=new_config) as writer:
        for name, entry in folder.tensors.items():
            changed = change((name, entry.dtype, entry.shape, bytes(folder.read_bytes(name))))
            if changed:
                writer.add(*changed)
        for tensor in add:
            writer.add(*tensor)
    return out


def flip_bit(*names: str) -> Change:
    """Flip the lowest bit of the last byte of these tensors."""

    def change(tensor: Tensor) -> Tensor:
        name, dtype, shape, data = tensor
        return (name, dtype, shape, data[:-1] + bytes([data[-1] ^ 1])) if name in names else tensor

    return change


def drop(prefix: str) -> Change:
    """Leave out tensors whose names begin so."""
    return lambda tensor: None if tensor[0].startswith(prefix) else tensor


def retype(name: str, dtype: str) -> Change:
    """Call the same bytes by another dtype of the same size."""
    return lambda tensor: (tensor[0], dtype, *tensor[2:]) if tensor[0] == name else tensor


def reshape(name: str, *shape: int) -> Change:
    """Give the same bytes another shape."""
    return lambda tensor: (*tensor[:2], shape, tensor[3]) if tensor[0] == name else tensor


def rename(old: str, new: str) -> Change:
    """Write a tensor under another name."""
    return lambda tensor: (new, *tensor[1:]) if tensor[0] == old else tensor


def set_config(folder: Path, **fields) -> None:
    """Change configuration fields of a folder in place."""
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
