"""The safetensors format: what a file's header says, believed only after it has been checked.

A file is eight bytes (the header's length, little endian), the header (JSON: name, dtype, shape and bytes of
every tensor), and the tensors' bytes without gaps.
"""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torpor.errors import CheckpointError

# Bits of one element, by safetensors' word for the dtype.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}

# The format's own limit: a longer header is refused by every reader.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies on disk.

    Attributes:
        name: Its name in the header.
        dtype: Safetensors' word, such as "BF16".
        shape: Its dimensions.
        file: The file that holds it.
        offset: Its first byte, counted from the start of the file.
        nbytes: Its length.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def num_bytes(dtype: str, shape: Iterable[int]) -> int | None:
    """Return how many bytes a tensor takes, or None where its elements do not fill whole bytes.

    Args:
        dtype: A key of `DTYPE_BITS`.
        shape: Dimensions.
    """
    whole, rest = divmod(math.prod(shape) * DTYPE_BITS[dtype], 8)
    return None if rest else whole


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read and check the header of one safetensors file; the tensors' bytes are not touched.

    Args:
        file: A regular file.

    Returns:
        The entries by name, in the order of their bytes.

    Raises:
        CheckpointError: The file is truncated, or its header is not a valid one.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(LENGTH_BYTES)
        if len(prefix) < LENGTH_BYTES:
            raise _bad(file, f"the file has {size} bytes, too few for a header")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise _bad(file, f"the header claims {length} bytes, the format allows {MAX_HEADER_BYTES}")
        if LENGTH_BYTES + length > size:
            raise _bad(file, f"the header claims {length} bytes, the file has {size}", truncated=True)
        text = stream.read(length)
    if not text.startswith(b"{"):
        raise _bad(file, "the header does not begin with a brace")
    fields = parse_json_object(text, file)
    fields.pop("__metadata__", None)

    data_start = LENGTH_BYTES + length
    entries = [_read_entry(name, fields[name], file, data_start) for name in fields]
    # An empty tensor lies between two others, so ties are settled by its end.
    entries.sort(key=lambda e: (e.offset, e.offset + e.nbytes))
    end, previous = data_start, None
    for entry in entries:
        if entry.offset < end:
            raise _bad(file, f"the bytes of {entry.name} overlap those of {previous}")
        if entry.offset > end:
            raise _bad(file, f"{entry.offset - end} bytes before {entry.name} belong to no tensor")
        end, previous = entry.offset + entry.nbytes, entry.name
    if end > size:
        raise _bad(file, f"{previous} ends at byte {end}, the file has {size}", truncated=True)
    if end < size:
        raise _bad(file, f"the last {size - end} bytes belong to no tensor")
    return {entry.name: entry for entry in entries}


def encode_entry(name: str, dtype: str, shape: tuple[int, ...], start: int, end: int) -> str:
    """Return one tensor's part of a header, as it stands between the header's braces.

    Args:
        name: The tensor's name.
        dtype: A key of `DTYPE_BITS`.
        shape: Its dimensions.
        start: Its first byte, counted from the end of the header.
        end: The byte after its last.
    """
    fields = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return f"{json.dumps(name)}:{json.dumps(fields, separators=(',', ':'))}"


def parse_json_object(text: bytes, file: Path) -> dict[str, Any]:
    """Parse bytes that must be one JSON object with no key written twice.

    Args:
        text: UTF-8.
        file: Where the text is from, for the message.

    Raises:
        CheckpointError: The text is anything else.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error or 'nested too deeply'}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a JSON {type(value).__name__}, needs an object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # The format forbids duplicates; json.loads alone would keep the last one and say nothing.
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r} is there twice")
        seen[key] = value
    return seen


def check_tensor_name(name: str, file: Path) -> None:
    """Refuse names that are empty or that would write control characters to a terminal.

    Raises:
        CheckpointError: Such a name.
    """
    if not name or not name.isprintable():
        raise CheckpointError(f"{file}: {name!r} is no name for a tensor: it is empty or not printable")


def _read_entry(name: str, fields: Any, file: Path, data_start: int) -> TensorEntry:
    check_tensor_name(name, file)
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad(file, f"the entry of {name} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _bad(file, f"{name} has dtype {dtype!r}; known are {', '.join(DTYPE_BITS)}")
    if not _are_counts(shape):
        raise _bad(file, f"{name} has shape {shape!r}, needs a list of counts")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(file, f"{name} has data_offsets {offsets!r}, needs [start, end]")
    start, end = offsets
    needed = num_bytes(dtype, shape)
    if needed is None:
        raise _bad(file, f"{name} is {dtype} {shape}: its elements do not fill whole bytes")
    if end - start != needed:
        raise _bad(file, f"{name} is {dtype} {shape}: {needed} bytes, but data_offsets span {end - start}")
    return TensorEntry(name, dtype, tuple(shape), file, data_start + start, needed)


def _are_counts(value: Any) -> bool:
    # `type` and not isinstance: True is an int to Python and not to the format.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _bad(file: Path, what: str, truncated: bool = False) -> CheckpointError:
    remedy = "The file is truncated" if truncated else "The file is damaged or not safetensors"
    return CheckpointError(f"{file}: {what}\n  {remedy}; fetch or write it again.")
