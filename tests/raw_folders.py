"""Safetensors folders written by hand, byte for byte, so that they can be wrong in any way."""

import json
import struct
from pathlib import Path
from typing import Any

# name -> dtype, shape, bytes
Tensors = dict[str, tuple[str, list[int], bytes]]


def header_of(tensors: Tensors) -> dict[str, Any]:
    """The header that a sound file with these tensors has."""
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    return header


def write_file(file: Path, header: dict[str, Any] | bytes, data: bytes, length: int | None = None) -> Path:
    """Write a safetensors file with this header, as it is, and this length in front of it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def write_sound_file(file: Path, tensors: Tensors) -> Path:
    """Write a safetensors file in which nothing is wrong."""
    return write_file(file, header_of(tensors), b"".join(data for _, _, data in tensors.values()))


def write_folder(
    path: Path, shards: dict[str, Tensors], weight_map: dict[str, str] | None = None, config: str = "{}"
) -> Path:
    """Write a folder of such files, with an index where `weight_map` is given."""
    path.mkdir()
    (path / "config.json").write_text(config)
    for name, tensors in shards.items():
        write_sound_file(path / name, tensors)
    if weight_map is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path
