"""Hugging Face folders: opened from their headers alone, read as raw bytes, written aside and renamed."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self

from torpor.checkpoints.header import (
    DTYPE_BITS,
    LENGTH_BYTES,
    TensorEntry,
    check_tensor_name,
    encode_entry,
    num_bytes,
    parse_json_object,
    read_header,
)
from torpor.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# How a file came to be where it is.
Placement = Literal["reflinked", "hard-linked", "copied"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"

# Formats that hold weights. Several are pickles, which run code when read: none is ever opened or copied.
WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf", ".onnx", ".npz")
)
INDEX_SUFFIX = ".index.json"

ASIDE_SUFFIX = ".partial"
# Linux's request to share a file's blocks with another (linux/fs.h); Python has no name for it.
FICLONE = 0x40049409
MAX_JSON_BYTES = 2**28
CHUNK_BYTES = 4 * 2**20
_SAMPLE_PIECES = 16
KERNEL_COPY_BYTES = 2**30
# What a system says that cannot copy between two files by itself.
CANNOT_COPY = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY)
# A shard's header is written last, into room left for it, so that tensors can be streamed behind it.
MIN_HEADER_ROOM = 2**12
# Complete shards whose bytes the system still moves to the disk while the next one is written.
MAX_SEALED = 8
MAX_HEADER_ROOM = 2**20

# Safetensors' words for torch's dtypes, by attribute name; torch itself is imported only to move tensors.
TORCH_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}


@dataclass(frozen=True)
class Folder:
    """An opened Hugging Face folder; made by `open_folder`, which has checked everything in it.

    Attributes:
        path: The folder.
        config: What config.json says.
        config_bytes: The same, verbatim.
        tensors: Every tensor by name.
        companions: The other files that belong to the model: tokenizer, generation, remote code, licence.
    """

    path: Path
    config: Mapping[str, Any]
    config_bytes: bytes
    tensors: Mapping[str, TensorEntry]
    companions: tuple[Path, ...]

    def entry(self, name: str) -> TensorEntry:
        """Return where a tensor lies.

        Raises:
            CheckpointError: The folder has no such tensor.
        """
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name}") from None

    def iter_bytes(self, name: str) -> Iterator[memoryview]:
        """Yield a tensor's bytes in pieces of equal size; each piece is valid until the next is asked for.

        Raises:
            CheckpointError: No such tensor, or the file has shrunk since it was opened.
        """
        entry = self.entry(name)
        piece = memoryview(bytearray(min(CHUNK_BYTES, entry.nbytes)))
        with entry.file.open("rb") as stream:
            stream.seek(entry.offset)
            left = entry.nbytes
            while left:
                got = stream.readinto(piece[:left])
                if got < min(len(piece), left):
                    raise _shrunk(entry, left - got)
                yield piece[:got]
                left -= got

    def read_bytes(self, name: str) -> bytearray:
        """Return a tensor's bytes, in memory of their own.

        Raises:
            CheckpointError: As `iter_bytes`.
        """
        data, start = bytearray(self.entry(name).nbytes), 0
        for piece in self.iter_bytes(name):
            data[start : start + len(piece)] = piece
            start += len(piece)
        return data

    def read_sample(self, name: str, nbytes: int) -> bytes:
        """Return about so many of a tensor's bytes, in pieces spread over all of it; or all that it has.

        Raises:
            CheckpointError: As `iter_bytes`.
        """
        entry = self.entry(name)
        if entry.nbytes <= nbytes:
            return bytes(self.read_bytes(name))
        size, pieces = -(-nbytes // _SAMPLE_PIECES), []
        with entry.file.open("rb") as stream:
            for number in range(_SAMPLE_PIECES):
                stream.seek(entry.offset + (entry.nbytes - size) * number // (_SAMPLE_PIECES - 1))
                pieces.append(stream.read(size))
                if len(pieces[-1]) < size:
                    raise _shrunk(entry, size - len(pieces[-1]))
        return b"".join(pieces)

    def read_tensor(self, name: str) -> "torch.Tensor":
        """Return a tensor on the CPU, in memory of its own.

        Raises:
            CheckpointError: As `iter_bytes`, or PyTorch has no such dtype.
        """
        import torch

        entry = self.entry(name)
        if entry.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{name} in {entry.file} is {entry.dtype}, which PyTorch cannot hold")
        dtype = getattr(torch, TORCH_DTYPES[entry.dtype])
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self.read_bytes(name), dtype=dtype).reshape(entry.shape)

    def sha256(self, name: str) -> str:
        """Return the SHA-256 of a tensor's bytes, in hexadecimal.

        Raises:
            CheckpointError: As `iter_bytes`.
        """
        digest = hashlib.sha256()
        for piece in self.iter_bytes(name):
            digest.update(piece)
        return digest.hexdigest()


def open_folder(path: str | Path) -> Folder:
    """Open a Hugging Face folder and check it from its headers; no tensor is read.

    Args:
        path: A folder with config.json and safetensors weights, in one file or in shards with an index.

    Raises:
        CheckpointError: The folder is missing, unreadable, damaged, contradicts itself, points outside
            itself, or holds its weights in another format.
    """
    try:
        return _open_folder(Path(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _open_folder(path: Path) -> Folder:
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        raise CheckpointError(
            f"checkpoint folder {path} {state}\n"
            "  A Hugging Face folder on this machine is needed, with config.json and *.safetensors."
        )
    files = {entry.name for entry in path.iterdir() if not entry.is_dir()}
    if CONFIG_NAME not in files:
        raise CheckpointError(f"{path} has no {CONFIG_NAME}\n  It is not a Hugging Face model folder.")
    config_bytes, config = _read_json(_inside(path, CONFIG_NAME))

    weight_map = _read_weight_map(path, files)
    shards = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_NAME]
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(_inside(path, shard)).items():
            if name in tensors:
                raise CheckpointError(
                    f"{path}: {name} is in two files, {tensors[name].file.name} and {shard}\n"
                    "  Which one counts is undecidable; write the folder again."
                )
            if weight_map is not None and weight_map.get(name) != shard:
                said = weight_map.get(name, "no file")
                raise CheckpointError(f"{path}: {name} is in {shard}, the index says {said}\n  {_REINDEX}")
            tensors[name] = entry
    absent = [(name, shard) for name, shard in (weight_map or {}).items() if name not in tensors]
    if absent:
        name, shard = absent[0]
        raise CheckpointError(
            f"{path}: the index lists {len(absent)} tensors that no file holds, first {name}"
            f" (said to be in {shard})\n  {_REINDEX}"
        )
    companions = tuple(
        _inside(path, name)
        for name in sorted(files - {CONFIG_NAME, INDEX_NAME})
        if not _holds_weights(name) and not name.startswith(".")
    )
    return Folder(path, MappingProxyType(config), config_bytes, MappingProxyType(tensors), companions)


_REINDEX = f"The index {INDEX_NAME} does not describe the files beside it; fetch or write the folder again."


def _read_json(file: Path) -> tuple[bytes, dict[str, Any]]:
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{file} has {size} bytes, at most {MAX_JSON_BYTES} are read")
    text = file.read_bytes()
    return text, parse_json_object(text, file)


def _holds_weights(name: str) -> bool:
    return Path(name).suffix in WEIGHT_SUFFIXES or name.endswith(INDEX_SUFFIX)


def _read_weight_map(path: Path, files: set[str]) -> dict[str, str] | None:
    """Return the index's tensor -> file map, or None for a folder with the one file `model.safetensors`."""
    if INDEX_NAME not in files:
        if SINGLE_NAME in files:
            return None
        shards = sorted(name for name in files if name.endswith(".safetensors"))
        if shards:
            raise CheckpointError(
                f"{path} has {len(shards)} safetensors files, first {shards[0]}, and no {INDEX_NAME}\n"
                "  Without it nobody can tell whether all are there; fetch or write the folder again."
            )
        others = sorted(name for name in files if _holds_weights(name))
        if others:
            raise CheckpointError(
                f"{path} holds its weights as {others[0]}, needs safetensors\n"
                "  Other formats can run code when read and are never opened; convert the folder first."
            )
        raise CheckpointError(f"{path} has neither {SINGLE_NAME} nor {INDEX_NAME}: it holds no weights")

    file = _inside(path, INDEX_NAME)
    weight_map = _read_json(file)[1].get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: weight_map is {weight_map!r}, needs a map from tensor to file")
    checked: set[str] = set()
    for name, shard in weight_map.items():
        check_tensor_name(name, file)
        if isinstance(shard, str) and shard in checked:
            continue
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{file} puts {name} into {shard!r}, needs the plain name of a .safetensors file beside it"
            )
        checked.add(shard)
    if SINGLE_NAME in files and SINGLE_NAME not in weight_map.values() and not _is_linked(path, checked):
        raise CheckpointError(
            f"{path} has {SINGLE_NAME} and an index that does not mention it\n"
            "  Some readers take the one and some the other; remove the one that is out of date."
        )
    return weight_map


def _is_linked(path: Path, shards: Iterable[str]) -> bool:
    """Whether `model.safetensors` is one of the shards under its old name, which `in_place` removes last."""
    single = path / SINGLE_NAME
    return any((path / shard).exists() and single.samefile(path / shard) for shard in shards)


def _inside(path: Path, name: str) -> Path:
    """Return the regular file `name` of a folder, refusing links that lead out of it.

    A download cache keeps its files in `blobs/` and links to them from `snapshots/<revision>/`: that one way
    out is allowed.
    """
    file, home = path / name, path.resolve()
    try:
        target = file.resolve(strict=True)
    except (OSError, RuntimeError):
        reason = "is a broken link" if file.is_symlink() else "is missing"
        raise CheckpointError(f"{file} {reason}\n  Fetch or write the folder again.") from None
    cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if home not in target.parents and not cached:
        raise CheckpointError(
            f"{file} is a link to {target}, outside its folder\n"
            "  Replace the link by the file if that is really meant."
        )
    if not target.is_file():
        raise CheckpointError(f"{file} is not a regular file")
    return file


class FolderWriter:
    """Writes a Hugging Face folder, tensor by tensor, that exists complete or not at all.

    Shards are streamed into a hidden folder beside `out`, which is fsynced and renamed onto `out` when the
    `with` block ends. If the block raises, it is removed; if the process is killed, the next writer of the
    same folder removes it. Use as a context manager.

    Args:
        out: The folder to make; nothing may be there.
        like: The folder whose configuration and companions the new one gets; None for a folder of its own.
        config: What config.json shall say; `like`'s bytes, verbatim, where None.
        companions: Other files to copy into it, such as the tokenizer's; `like`'s where None.
        contents: What companions of these names shall hold instead; files of other names are added.
        max_shard_bytes: Size at which another shard is begun.

    Raises:
        CheckpointError: `out` exists.
        ValueError: Neither `like` nor `config` is given.
    """

    def __init__(
        self,
        out: str | Path,
        like: Folder | None = None,
        config: Mapping[str, Any] | None = None,
        companions: Iterable[Path] | None = None,
        contents: Mapping[str, bytes] | None = None,
        max_shard_bytes: int = 5 * 2**30,
    ):
        self.out = Path(out)
        self._aside = self.out.parent / f".{self.out.name}.{secrets.token_hex(4)}{ASIDE_SUFFIX}"
        self._lock: int | None = None
        if config is not None:
            self._config_bytes = (json.dumps(dict(config), indent=2) + "\n").encode()
        elif like is not None:
            self._config_bytes = like.config_bytes
        else:
            raise ValueError("FolderWriter needs a folder to be like, or a config")
        if companions is None:
            companions = like.companions if like else ()
        self._companions = tuple(companions)
        self._contents = dict(contents or {})
        self._max_shard_bytes = max_shard_bytes
        self._written: dict[str, int] = {}  # tensor -> number of its shard
        self._total_bytes = 0
        self._num_shards = 0
        self._shard: Shard | None = None
        self._sealed: list[Shard] = []  # complete, and on their way to the disk while the next one is written
        expected = like.tensors.values() if like else ()
        room = sum(len(encode_entry(e.name, e.dtype, e.shape, 2**40, 2**40)) + 1 for e in expected)
        self._header_room = round_up(min(max(room, MIN_HEADER_ROOM), MAX_HEADER_ROOM))

    def __enter__(self) -> Self:
        self._refuse_existing()
        self.out.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.out)
        self._aside.mkdir()
        self._lock = lock_folder(self._aside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for shard in (*self._sealed, *((self._shard,) if self._shard else ())):
                shard.stream.close()
            # After a rename there is nothing left under this name.
            shutil.rmtree(self._aside, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)

    def add(
        self, name: str, dtype: str, shape: Iterable[int], buffer: bytes | bytearray | memoryview
    ) -> None:
        """Write one tensor from its bytes.

        Args:
            name: Its name.
            dtype: Safetensors' word, such as "BF16".
            shape: Its dimensions.
            buffer: Its bytes, row-major.

        Raises:
            CheckpointError: The name was written before, or the bytes do not fit dtype and shape.
        """
        view = memoryview(buffer)
        # A view without elements cannot be cast.
        view = view.cast("B") if view.nbytes else memoryview(b"")
        self._add(name, dtype, tuple(shape), len(view), (view,))

    def add_tensor(self, name: str, tensor: "torch.Tensor", dtype: str | None = None) -> None:
        """Write one tensor, cast first if `dtype` (safetensors' word) is given.

        Raises:
            CheckpointError: As `add`, or safetensors has no word for the dtype.
        """
        import torch

        words = {getattr(torch, attribute): word for word, attribute in TORCH_DTYPES.items()}
        if dtype is not None:
            tensor = tensor.to(getattr(torch, TORCH_DTYPES[dtype]))
        if tensor.dtype not in words:
            raise CheckpointError(f"{name} is {tensor.dtype}, for which safetensors has no word")
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self.add(name, words[tensor.dtype], tensor.shape, flat.numpy().data)

    def copy(self, source: Folder, name: str, new_name: str | None = None) -> None:
        """Stream one tensor's bytes over from another folder, unchanged.

        Args:
            source: That folder.
            name: Its tensor.
            new_name: What to call it; the same where None.

        Raises:
            CheckpointError: As `add`, or `source` has no such tensor.
        """
        entry = source.entry(name)
        self._add(new_name or name, entry.dtype, entry.shape, entry.nbytes, source.iter_bytes(name), entry)

    def adopt(self, source: Folder, on_file: Callable[[int], None] | None = None) -> Counter[Placement]:
        """Take over all shards of another folder as they are; where the file system can, nothing is copied.

        A reflinked file has nothing in common with the source's but its blocks, until one of them is changed.
        A hard-linked one is the same file: what writes into the one, in place, writes into the other.

        Args:
            source: That folder.
            on_file: Called after each file with its size.

        Returns:
            How many bytes were reflinked, hard-linked and copied.

        Raises:
            CheckpointError: One of its tensors was written before.
        """
        if self._shard:
            self._close_shard()
        placed: Counter[Placement] = Counter()
        numbers: dict[Path, int] = {}
        for name, entry in source.tensors.items():
            if name in self._written:
                raise CheckpointError(f"{name} is written to {self.out} a second time")
            if entry.file not in numbers:
                self._num_shards += 1
                numbers[entry.file] = self._num_shards
                size = entry.file.stat().st_size
                placed[_place(entry.file.resolve(), self._shard_file(self._num_shards))] += size
                if on_file:
                    on_file(size)
            self._written[name] = numbers[entry.file]
            self._total_bytes += entry.nbytes
        return placed

    def _add(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        pieces: Iterable[memoryview],
        entry: TensorEntry | None = None,
    ) -> None:
        check_tensor_name(name, self.out)
        if name in self._written:
            raise CheckpointError(f"{name} is written to {self.out} a second time")
        if dtype not in DTYPE_BITS:
            raise CheckpointError(f"{name} has dtype {dtype!r}; known are {', '.join(DTYPE_BITS)}")
        if num_bytes(dtype, shape) != nbytes:
            raise CheckpointError(
                f"{name} is {dtype} {list(shape)}: {num_bytes(dtype, shape)} bytes, but {nbytes} were given"
            )
        if self._shard and not self._shard.has_room(name, dtype, shape, nbytes, self._max_shard_bytes):
            self._close_shard()
        if self._shard is None:
            self._num_shards += 1
            stream = self._shard_file(self._num_shards).open("xb")
            self._shard = Shard(stream, self._header_room)
        self._shard.write(name, dtype, shape, nbytes, pieces, entry)
        self._written[name] = self._num_shards
        self._total_bytes += nbytes

    def _shard_file(self, number: int) -> Path:
        return self._aside / f"shard-{number}"

    def _close_shard(self) -> None:
        assert self._shard is not None
        self._shard.seal()
        self._sealed.append(self._shard)
        self._shard = None
        if len(self._sealed) > MAX_SEALED:
            self._sealed.pop(0).finish()

    def _finish(self) -> None:
        if not self._written:
            raise CheckpointError(f"no tensor was written to {self.out}")
        if self._shard:
            self._close_shard()
        while self._sealed:
            self._sealed.pop(0).finish()
        names = {
            n: SINGLE_NAME
            if self._num_shards == 1
            else f"model-{n:05d}-of-{self._num_shards:05d}.safetensors"
            for n in range(1, self._num_shards + 1)
        }
        for number, name in names.items():
            self._shard_file(number).rename(self._aside / name)
        if self._num_shards > 1:
            index = {
                "metadata": {"total_size": self._total_bytes},
                "weight_map": {tensor: names[n] for tensor, n in sorted(self._written.items())},
            }
            self._write_file(INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())
        for companion in self._companions:
            self._write_file(companion.name, self._contents.get(companion.name) or companion.read_bytes())
        for name in self._contents.keys() - {companion.name for companion in self._companions}:
            self._write_file(name, self._contents[name])
        self._write_file(CONFIG_NAME, self._config_bytes)
        fsync_path(self._aside)
        # Renaming onto an empty folder succeeds, so the name is looked at once more.
        self._refuse_existing()
        self._aside.rename(self.out)
        fsync_path(self.out.parent)

    def _write_file(self, name: str, data: bytes) -> None:
        with (self._aside / name).open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.out):
            raise CheckpointError(
                f"output folder {self.out} exists\n  Nothing is overwritten: remove it, or name another."
            )


class Shard:
    """A safetensors file being written: tensors first, then the header into the room left for it.

    Args:
        stream: A new, empty file.
        header_room: Bytes of that room, a multiple of eight.
    """

    def __init__(self, stream: BinaryIO, header_room: int):
        self.stream = stream
        self._room = header_room
        self._entries = ['"__metadata__":{"format":"pt"}']  # without it some readers refuse the file
        self._header_bytes = len("{}") + len(self._entries[0])
        self._nbytes = 0

    def has_room(self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int, max_bytes: int) -> bool:
        """Whether one more tensor can follow the ones there are.

        Readers map the file and view it in the tensor's dtype, so each tensor has to start at a multiple of
        its element's size; the format allows no gap to make that so.
        """
        aligned = not self._nbytes % max(DTYPE_BITS[dtype] // 8, 1)
        entry = encode_entry(name, dtype, shape, self._nbytes, self._nbytes + nbytes)
        small = self._nbytes + nbytes <= max_bytes and self._header_bytes_with(entry) <= self._room
        return aligned and small

    def write(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        pieces: Iterable[memoryview],
        source: TensorEntry | None = None,
    ) -> None:
        """Stream one tensor; a failure on the way leaves the shard as it was.

        Args:
            name: What to call it.
            dtype: A key of `DTYPE_BITS`.
            shape: Its dimensions.
            nbytes: Its length.
            pieces: Its bytes.
            source: Where the same bytes lie in another file, if they do: the kernel can move them by itself.
        """
        entry = encode_entry(name, dtype, shape, self._nbytes, self._nbytes + nbytes)
        if not self._nbytes:
            # The first tensor gets in however long its name is, and however large it is.
            self._room = max(self._room, round_up(self._header_bytes_with(entry)))
        start = LENGTH_BYTES + self._room + self._nbytes
        self.stream.seek(start)
        try:
            if source is None or not _copy_in_kernel(source, self.stream):
                for piece in pieces:
                    self.stream.write(piece)
        except BaseException:
            self.stream.seek(start)
            self.stream.truncate()
            raise
        self._entries.append(entry)
        self._header_bytes = self._header_bytes_with(entry)
        self._nbytes += nbytes

    def seal(self) -> None:
        """Write the header: no tensor can follow."""
        self.stream.seek(0)
        header = ("{" + ",".join(self._entries) + "}").encode()
        self.stream.write(struct.pack("<Q", self._room) + header.ljust(self._room))
        self.stream.flush()

    def finish(self) -> None:
        """Make a sealed shard durable and close the file."""
        with self.stream:
            os.fsync(self.stream.fileno())

    def _header_bytes_with(self, entry: str) -> int:
        return self._header_bytes + len(",") + len(entry)


def _shrunk(entry: TensorEntry, lacking: int) -> CheckpointError:
    return CheckpointError(
        f"{entry.file} ended {lacking} bytes before the end of {entry.name}\n"
        "  It has changed since it was opened; nothing may write to a folder in use."
    )


def _copy_in_kernel(entry: TensorEntry, stream: BinaryIO) -> bool:
    """Append a tensor's bytes to a file without bringing them here; False where the system cannot.

    Raises:
        CheckpointError: The tensor's file has shrunk since it was opened.
    """
    if not hasattr(os, "copy_file_range"):
        return False
    stream.flush()
    left = entry.nbytes
    with entry.file.open("rb") as source:
        source.seek(entry.offset)
        while left:
            try:
                moved = os.copy_file_range(source.fileno(), stream.fileno(), min(left, KERNEL_COPY_BYTES))
            except OSError as error:
                if left == entry.nbytes and error.errno in CANNOT_COPY:
                    return False
                raise
            if not moved:
                raise _shrunk(entry, left)
            left -= moved
    return True


def _place(file: Path, target: Path) -> Placement:
    """Make `target` hold what `file` holds, in the cheapest way that the file system offers."""
    with file.open("rb") as source, target.open("xb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), FICLONE, source.fileno())
        except OSError:
            pass
        else:
            os.fsync(copy.fileno())
            return "reflinked"
    target.unlink()
    try:
        os.link(file, target)
    except OSError:
        with file.open("rb") as source, target.open("xb") as copy:
            shutil.copyfileobj(source, copy, CHUNK_BYTES)
            copy.flush()
            os.fsync(copy.fileno())
        return "copied"
    return "hard-linked"


def round_up(nbytes: int) -> int:
    """Return the next multiple of eight, where safetensors' data begins."""
    return -(-nbytes // 8) * 8


def lock_folder(path: Path) -> int | None:
    """Lock a folder until the descriptor is closed or its process dies; None where that cannot be."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_abandoned(out: Path) -> None:
    """Remove what writers of `out` left behind when they were killed; a living writer holds a lock."""
    for path in out.parent.iterdir():
        if path.name.startswith(f".{out.name}.") and path.name.endswith(ASIDE_SUFFIX) and path.is_dir():
            lock = lock_folder(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
