"""Small folders of every family, written from the manifests in tests/golden.

A manifest is a configuration and the names, dtypes and shapes of a folder's tensors: the trunk's, the MTP
layers', and which of these copy which of those.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_NAMES = sorted(file.stem for file in GOLDEN.glob("*.json"))

_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1, "I64": 8, "I32": 4}


def read_manifest(name: str) -> dict:
    """Return a manifest: config, trunk, mtp, copies."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


def tensor_bytes(name: str, dtype: str, shape: list[int], seed: int) -> bytes:
    """Return values that differ from tensor to tensor and from seed to seed: small numbers, or any bytes."""
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
    random = np.random.default_rng(key)
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == "F32":
        return (0.05 * random.standard_normal(count)).astype("<f4").tobytes()
    if dtype == "BF16":
        return (
            ((0.05 * random.standard_normal(count)).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        )
    if dtype == "I64":
        return np.zeros(count, dtype="<i8").tobytes()
    return random.bytes(count * _BYTES[dtype])


def golden_tensors(name: str, seed: int = 0) -> dict[str, tuple[str, list[int], bytes]]:
    """Return a family's tensors as `raw_folders` takes them; copies have the bytes of what they copy."""
    manifest, tensors = read_manifest(name), {}
    for tensor, said in (manifest["trunk"] | manifest["mtp"]).items():
        dtype, shape = said.split(" ")
        dims = [int(n) for n in shape.split("x")] if shape else []
        tensors[tensor] = (dtype, dims, tensor_bytes(tensor, dtype, dims, seed))
    for copy, original in manifest["copies"].items():
        tensors[copy] = tensors[original]
    return tensors


def write_golden(path: Path, name: str, *, seed: int = 0, heads: bool = True, change=None, **config) -> Path:
    """Write a folder of one family.

    Args:
        path: Folder to create.
        name: A manifest.
        seed: Of all values.
        heads: Whether to write the MTP tensors.
        change: Takes the tensors and returns those to write.
        **config: Top-level configuration fields to replace; None removes one.
    """
    manifest = read_manifest(name)
    tensors = golden_tensors(name, seed)
    if not heads:
        tensors = {n: t for n, t in tensors.items() if n not in manifest["mtp"]}
    if change:
        tensors = change(tensors)
    fields = {k: v for k, v in (manifest["config"] | config).items() if k not in config or v is not None}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    (path / "generation_config.json").write_text("{}\n")
    (path / "tokenizer.json").write_text('{"made": "up"}\n')
    write_tensors(path / "model.safetensors", tensors)
    return path


def write_tensors(file: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
    """Write a safetensors file that every reader takes: widest elements first, so that all are aligned."""
    order = sorted(tensors, key=lambda name: (-_BYTES[tensors[name][0]], name))
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name in order:
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            stream.write(tensors[name][2])
    return file
