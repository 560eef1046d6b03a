"""A teacher's likeliest tokens on disk, computed once and read in every epoch and run.

One file, `teacher.topk`: 8 bytes with the length of a JSON header, the header, zeros up to a multiple of
4096, then for every window of the data the ids [S, k] of the teacher's k likeliest tokens, and after all ids
their logits [S, k] in falling order, in the teacher's own type. It is written aside and renamed, so that a
file of this name is always complete. The header says what it was made from; anything else is refused.
"""

import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torpor.errors import ConfigError
from torpor.megatron import parallel
from torpor.megatron.hidden_states import hand_over_projection
from torpor.megatron.host import current_device
from torpor.training import vocabulary
from torpor.training.config import OptimizationConfig
from torpor.training.data import Batch, BatchPlan, PackedWindows, Windows, token_dtype

NAME = "teacher.topk"
_ALIGNMENT = 4096
# BF16 has no NumPy type: its bits are stored.
_STORED: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype("<f4"), torch.bfloat16: np.dtype("<u2")}


@dataclass(frozen=True)
class CacheContent:
    """What a cache is made from; two caches of one content hold the same.

    Args:
        teacher: digest of the teacher's folder.
        data: digest of the tokens.
        num_windows: windows that the tokens make.
        sequence_length: tokens in a window, S.
        top_k: tokens kept for each position, k.
        vocab_size: tokens that there are.
        dtype: the type that the teacher computes in, "fp32" or "bf16".
    """

    teacher: str
    data: str
    num_windows: int
    sequence_length: int
    top_k: int
    vocab_size: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the logits."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]


class TeacherCache:
    """A complete cache, mapped into memory.

    Args:
        path: the file.
        content: what it was made from.
    """

    def __init__(self, path: Path, content: CacheContent):
        self._content = content
        self._ids, self._logits = _map(path, content, mode="r")

    def read(self, windows: Sequence[int], k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids (int64) and logits of the k likeliest tokens of these windows, [B, S, k] each."""
        ids = np.stack([self._ids[window, :, :k] for window in windows]).astype(np.int64)
        logits = np.stack([self._logits[window, :, :k] for window in windows])
        stored = torch.from_numpy(logits)
        return torch.from_numpy(ids), stored.view(self._content.torch_dtype)


def open_teacher_cache(folder: Path, wanted: CacheContent) -> TeacherCache | None:
    """Open the cache in a folder; None if there is none yet.

    Args:
        folder: where it lies.
        wanted: what it has to be made from. One that has more tokens for each position serves too.

    Raises:
        ConfigError: it was made from something else, or is damaged.
    """
    path = folder / NAME
    if not path.exists():
        return None
    content = _read_header(path)
    differing = [
        f"{field.name}: {getattr(content, field.name)} there, {getattr(wanted, field.name)} here"
        for field in dataclasses.fields(CacheContent)
        if field.name != "top_k" and getattr(content, field.name) != getattr(wanted, field.name)
    ]
    if content.top_k < wanted.top_k:
        differing.append(f"top_k: {content.top_k} there, {wanted.top_k} here")
    if differing:
        raise ConfigError(
            f"`teacher_cache`: {path} was made from something else\n  "
            + "\n  ".join(differing)
            + "\n  Remove it to have it made anew, or give another folder."
        )
    if path.stat().st_size != _layout(content)[-1]:
        raise ConfigError(
            f"`teacher_cache`: {path} has {path.stat().st_size} bytes, and its header says"
            f" {_layout(content)[-1]}\n  Remove it to have it made anew."
        )
    return TeacherCache(path, content)


def write_teacher_cache(
    folder: Path,
    content: CacheContent,
    teacher: torch.nn.Module,
    windows: PackedWindows,
    settings: OptimizationConfig,
) -> None:
    """Run a teacher over all windows and keep its likeliest tokens. Every rank calls it.

    Data-parallel ranks share the windows out among them; each last stage writes its own part of the file,
    which lies on a file system that all ranks see. What an interrupted pass leaves is begun anew.

    Args:
        folder: where to write; made if it is missing.
        content: what it is made from.
        teacher: this rank's bare chunk, with weights, its MTP layers asleep or absent.
        windows: the data.
        settings: batch sizes and layout.

    Raises:
        ConfigError: the folder cannot be written, or has no room, or another process is writing to it; on
            every rank, with nothing made.
    """
    _check_room(folder, _layout(content)[-1])
    path = folder / NAME
    partial = folder / (NAME + ".partial")
    with ExitStack() as lock:
        is_ours = True
        if parallel.global_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            is_ours = _begin(partial, content, lock)
        if not _is_true_on_all_ranks(is_ours):  # and the file is there for all of them
            raise ConfigError(
                f"`teacher_cache`: another process is writing {path}\n"
                "  Give the same command again once it is there, or give another folder."
            )
        ids, logits = _map(partial, content, mode="r+")
        _run_over_all(teacher, windows, settings, content, ids, logits)
        for array in (ids, logits):
            array.flush()
        torch.distributed.barrier()
        if parallel.global_rank() == 0:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        torch.distributed.barrier()


def _is_true_on_all_ranks(value: bool) -> bool:
    votes = torch.tensor([int(value)], dtype=torch.int32, device=current_device())
    torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN)
    return bool(votes.item())


def _check_room(folder: Path, size: int) -> None:
    """Check for what would end a pass in its middle: a full disk kills whoever writes to a mapped file."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        what = "is not writable" if nearest.is_dir() else "is a file"
        raise ConfigError(f"`teacher_cache`: {nearest} {what}\n  Give a folder that can be written.")
    free = shutil.disk_usage(nearest).free
    if size > free:
        raise ConfigError(
            f"`teacher_cache`: {folder} needs {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free\n"
            "  Give a folder on a larger disk, or use a smaller `top_k`."
        )


def _run_over_all(
    teacher: torch.nn.Module,
    windows: PackedWindows,
    settings: OptimizationConfig,
    content: CacheContent,
    ids: np.ndarray,
    logits: np.ndarray,
) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    plan = BatchPlan.of_this_rank(settings)
    micro_batches = _share_of(plan, content.num_windows)
    device = current_device()

    def batches() -> Iterator[tuple[list[int], Batch]]:
        for chosen in micro_batches:
            yield chosen, windows.batch(chosen, device)

    def forward_step(source: Iterator[tuple[list[int], Batch]], model: torch.nn.Module) -> Any:
        chosen, whole = next(source)
        batch = plan.own_part(whole)
        with hand_over_projection(model) as handover:
            output = model(
                input_ids=batch.tokens_BS,
                position_ids=batch.positions_BS,
                attention_mask=None,
                labels=batch.labels_BS,
            )

        def store(_: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            projection = handover.take()
            assert projection is not None, "the schedule asks the last stage alone"
            shape = (*batch.tokens_BS.t().shape, content.top_k)
            top_logits, top_ids = _likeliest(projection, content.top_k)
            if torch.distributed.get_rank(projection.tp_group) == 0:
                # Positions do not repeat in a row: they say which tokens of it this rank has.
                places = batch.positions_BS[0].cpu().numpy()
                for row, window in enumerate(chosen):
                    ids[window, places] = top_ids.view(shape)[:, row].cpu().numpy()
                    logits[window, places] = _as_stored(top_logits.view(shape)[:, row])
            return top_logits.new_zeros(()), {}

        return output, store

    teacher.eval()
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(),
            model=[teacher],
            num_microbatches=len(micro_batches),
            seq_length=settings.sequence_length,
            micro_batch_size=settings.micro_batch_size,
            forward_only=True,
        )


def _share_of(plan: BatchPlan, num_windows: int) -> list[list[int]]:
    """This data-parallel rank's windows, in as many micro-batches as any other's.

    The last windows are computed again where numbers do not divide: ranks that share experts run in step.
    """
    size = plan.micro_batch_size
    count = -(-num_windows // (size * plan.data_size))
    return [
        [min((i * plan.data_size + plan.data_rank) * size + j, num_windows - 1) for j in range(size)]
        for i in range(count)
    ]


def _likeliest(projection: Any, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and ids [N, k] of the k likeliest tokens, a chunk of tokens at a time."""
    tokens_NH = vocabulary.gather_tokens(projection)
    rows_VH, start = vocabulary.local_rows(projection)
    parts = [
        vocabulary.top_k(tokens_NH[chunk] @ rows_VH.t(), k, start, projection.tp_group)
        for chunk in vocabulary.chunks(len(tokens_NH), vocabulary.chunk_size(projection))
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _as_stored(logits: torch.Tensor) -> np.ndarray:
    logits = logits.cpu().contiguous()
    return (logits.view(torch.uint16) if logits.dtype == torch.bfloat16 else logits).numpy()


@dataclass(frozen=True)
class TeacherBatch(Batch):
    """A micro-batch with its teacher's likeliest tokens."""

    teacher_ids_BSK: torch.Tensor  # int64
    teacher_logits_BSK: torch.Tensor


class WindowsWithTeacher(Windows):
    """Windows whose batches bring their teacher's likeliest tokens along.

    Args:
        windows: the data.
        cache: made from it.
        k: tokens for each position.
    """

    def __init__(self, windows: PackedWindows, cache: TeacherCache, k: int):
        self._windows, self._cache, self._k = windows, cache, k
        self.seed, self.held_out, self.training = windows.seed, windows.held_out, windows.training

    def training_window(self, sample: int) -> int:
        """The window that is trained on as number `sample`, counted from the start of the run."""
        return self._windows.training_window(sample)

    def batch(self, windows: Sequence[int], device: torch.device) -> TeacherBatch:
        """The micro-batch of these windows."""
        batch = self._windows.batch(windows, device)
        ids_BSK, logits_BSK = (values.to(device) for values in self._cache.read(windows, self._k))
        return TeacherBatch(batch.tokens_BS, batch.labels_BS, batch.positions_BS, ids_BSK, logits_BSK)

    def digest(self) -> str:
        """SHA-256 of all tokens."""
        return self._windows.digest()


# --- the file -------------------------------------------------------------------------------------------


def _layout(content: CacheContent) -> tuple[int, int, int]:
    """Where the ids begin, where the logits begin, and where the file ends."""
    header = 8 + len(_encode(content))
    values = content.num_windows * content.sequence_length * content.top_k
    ids = -(-header // _ALIGNMENT) * _ALIGNMENT
    logits = ids + values * token_dtype(content.vocab_size).itemsize
    logits = -(-logits // _ALIGNMENT) * _ALIGNMENT
    return ids, logits, logits + values * _STORED[content.torch_dtype].itemsize


def _encode(content: CacheContent) -> bytes:
    return json.dumps(dataclasses.asdict(content), sort_keys=True).encode()


def _begin(path: Path, content: CacheContent, lock: ExitStack) -> bool:
    """Make an empty cache and hold it for as long as `lock` is open; False if another process holds it."""
    # Not "wb", which would empty what another process is writing.
    file = lock.enter_context(path.open("ab"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody is held off
        pass
    if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
        return False  # it was finished and renamed since it was opened
    header = _encode(content)
    file.truncate(0)
    file.write(len(header).to_bytes(8, "little") + header)
    file.truncate(_layout(content)[-1])
    return True


def _read_header(path: Path) -> CacheContent:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _ALIGNMENT:
                raise ValueError(f"a header of {length} bytes")
            values = json.loads(file.read(length))
        content = CacheContent(**values)
        _layout(content)  # its values make sense
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"`teacher_cache`: {path} is no cache of a teacher: {error}\n  Remove it to have it made anew."
        ) from None
    return content


def _map(path: Path, content: CacheContent, *, mode: Any) -> tuple[np.memmap, np.memmap]:
    ids, logits, _ = _layout(content)
    shape = (content.num_windows, content.sequence_length, content.top_k)
    return (
        np.memmap(path, token_dtype(content.vocab_size), mode=mode, offset=ids, shape=shape),
        np.memmap(path, _STORED[content.torch_dtype], mode=mode, offset=logits, shape=shape),
    )
