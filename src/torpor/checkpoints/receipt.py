"""Receipts: what a verified export held, written down so that it can be checked again without its source."""

import hashlib
import json
import os
import platform
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torpor.checkpoints.folder import Folder, open_folder
from torpor.checkpoints.header import parse_json_object
from torpor.checkpoints.verify import Progress, VerifyResult, num_readers
from torpor.errors import CheckpointError

FORMAT = 1
# Libraries that may have written the folder; their versions help whoever looks into a difference.
LIBRARIES = ("torpor", "safetensors", "transformers", "torch", "megatron-core", "nvidia-modelopt")


@dataclass(frozen=True)
class ReceiptResult:
    """How a folder compares with the receipt of what it once was.

    Attributes:
        receipt: The receipt.
        export: The folder.
        family: Its family, as the receipt says.
        tensors: How many tensors the receipt lists.
        differing: Those with other bytes, dtype or shape now.
        missing: Those that are gone.
        unexpected: Tensors that the receipt does not list.
        is_config_changed: Whether config.json is another one.
    """

    receipt: Path
    export: Path
    family: str
    tensors: int
    differing: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    is_config_changed: bool

    @property
    def ok(self) -> bool:
        """Whether the folder is what the receipt says."""
        return not (self.differing or self.missing or self.unexpected or self.is_config_changed)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values for `json.dumps`."""
        return {
            "ok": self.ok,
            "receipt": str(self.receipt),
            "family": self.family,
            "tensors": self.tensors,
            "differing": list(self.differing),
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "config_changed": self.is_config_changed,
        }


def write_receipt(result: VerifyResult, file: str | Path) -> None:
    """Write down what a verified export holds.

    Args:
        result: A verification that went well, made with `hash_all`.
        file: Where to; nothing may be there.

    Raises:
        CheckpointError: The verification failed, `file` exists or cannot be written.
    """
    file = Path(file)
    if not result.ok:
        raise CheckpointError(f"no receipt is written for {result.export}: its verification failed")
    export = open_folder(result.export)
    if export.tensors.keys() != result.export_sha256.keys():
        raise CheckpointError(f"{result.export} has changed since it was verified")
    mtp, copies = {tensor.name for tensor in result.mtp}, set(result.copies)
    compared = result.to_json()
    del compared["mtp"]["sha256"]
    receipt = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "family": result.family,
        "source": {"path": str(result.source), "config_sha256": _config_sha256(open_folder(result.source))},
        "export": {"path": str(result.export), "config_sha256": _config_sha256(export)},
        "compared": compared,
        "tensors": {
            name: {
                "part": "mtp" if name in mtp else "copy" if name in copies else "trunk",
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "sha256": result.export_sha256[name],
            }
            for name, entry in sorted(export.tensors.items())
        },
    }
    _write_new(file, (json.dumps(receipt, indent=1) + "\n").encode())


def check_receipt(file: str | Path, export: str | Path, progress: Progress | None = None) -> ReceiptResult:
    """Compare a folder with the receipt of what it once was; the source is not needed.

    Args:
        file: The receipt.
        export: The folder.
        progress: Called after each tensor with the bytes dealt with so far, and all there are.

    Raises:
        CheckpointError: The receipt or the folder cannot be read.
    """
    file = Path(file)
    receipt = _read_receipt(file)
    folder = open_folder(export)
    listed: Mapping[str, Any] = receipt["tensors"]
    present = [name for name in listed if name in folder.tensors]
    total, done = sum(folder.tensors[name].nbytes for name in present), 0
    differing = []

    def is_same(name: str) -> tuple[str, bool]:
        entry, said = folder.tensors[name], listed[name]
        alike = (entry.dtype, list(entry.shape)) == (said["dtype"], said["shape"])
        return name, alike and folder.sha256(name) == said["sha256"]

    with ThreadPoolExecutor(num_readers()) as pool:
        by_size = sorted(present, key=lambda name: (-folder.tensors[name].nbytes, name))
        for task in as_completed([pool.submit(is_same, name) for name in by_size]):
            name, same = task.result()
            if not same:
                differing.append(name)
            done += folder.tensors[name].nbytes
            if progress:
                progress(done, total)
    return ReceiptResult(
        receipt=file,
        export=folder.path,
        family=receipt["family"],
        tensors=len(listed),
        differing=tuple(sorted(differing)),
        missing=tuple(sorted(name for name in listed if name not in folder.tensors)),
        unexpected=tuple(sorted(name for name in folder.tensors if name not in listed)),
        is_config_changed=_config_sha256(folder) != receipt["export"]["config_sha256"],
    )


def _read_receipt(file: Path) -> dict[str, Any]:
    try:
        receipt = parse_json_object(file.read_bytes(), file)
    except OSError as error:
        raise CheckpointError(f"receipt {file} cannot be read: {error}") from None
    if receipt.get("format") != FORMAT:
        raise CheckpointError(f"receipt {file} has format {receipt.get('format')!r}, needs {FORMAT}")
    needs: dict[str, Callable[[Any], bool]] = {
        "family": lambda value: isinstance(value, str),
        "export": lambda value: isinstance(value, dict) and isinstance(value.get("config_sha256"), str),
        "tensors": lambda value: (
            isinstance(value, dict) and bool(value) and all(map(_is_tensor, value.values()))
        ),
    }
    for field, is_fine in needs.items():
        if not is_fine(receipt.get(field)):
            raise CheckpointError(f"receipt {file} has no valid {field}: it is damaged or was edited")
    return receipt


def _is_tensor(said: Any) -> bool:
    return isinstance(said, dict) and {"dtype", "shape", "sha256"} <= said.keys()


def _config_sha256(folder: Folder) -> str:
    return hashlib.sha256(folder.config_bytes).hexdigest()


def _versions() -> dict[str, str]:
    """The versions of everything that may have had a hand in it; nothing is imported for that."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def _write_new(file: Path, data: bytes) -> None:
    """Write a file that exists complete or not at all, and only if there is none."""
    aside = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    try:
        try:
            with aside.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.link(aside, file)  # unlike a rename it fails where something is
        finally:
            aside.unlink(missing_ok=True)
    except FileExistsError:
        raise CheckpointError(
            f"receipt {file} exists\n  To check a folder against it, name the folder alone:"
            f" torpor verify --receipt {file} EXPORT"
        ) from None
    except OSError as error:
        raise CheckpointError(f"receipt {file} could not be written: {error}") from None
