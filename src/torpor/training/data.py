"""From documents to this rank's micro-batches: tokenizing, packing, splitting, shuffling.

Every choice is a pure function of the data, the tokenizer, the seed and the step, never of the layout or of
what ran before: a resumed run asks for step k and gets what the uninterrupted run got, and a run on four
data-parallel ranks sees the same global batches as a run on one.
"""

import abc
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from torpor.errors import ConfigError
from torpor.training.sources import Source, list_files, read_documents

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from torpor.training.config import OptimizationConfig

# Rare scripts, digits, code, whitespace runs and an emoji: tokenizers with equal vocabularies but different
# merges, normalizers or pre-tokenizers split at least one of these differently.
_PROBE = 'Torpor 0123456789 naïve façade\tdef f(x):\n\n    return  x**2  # 深い眠り Ωμέγα 🦔 "quoted"'
_DOCUMENTS_PER_CALL = 512


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Load a folder's tokenizer from its own files, without the network and without running its code.

    Raises:
        ConfigError: the folder has no tokenizer that Transformers can read, or it has no end-of-text token.
    """
    import transformers

    # Set here and not by whoever starts Torpor: importing Transformers sets the level anew. Its remarks are
    # about the model type in config.json, which no tokenizer needs.
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the library raises whatever its reader met
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{folder}: the tokenizer cannot be loaded: {first}\n"
            "  The folder needs tokenizer.json and tokenizer_config.json beside its weights."
        ) from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{folder}: the tokenizer has no end-of-text token, which separates packed documents\n"
            "  Set `eos_token` in its tokenizer_config.json."
        )
    return tokenizer


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256 of what decides a tokenizer's output: vocabulary, end-of-text token and the probe's tokens."""
    probe = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    content = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id, probe])
    return hashlib.sha256(content.encode()).hexdigest()


def check_tokenizers(
    teacher: "PreTrainedTokenizerBase", student: "PreTrainedTokenizerBase", vocab_sizes: tuple[int, int]
) -> None:
    """Check that both models read the same tokens, which a logit-by-logit comparison takes for granted.

    Args:
        teacher: the teacher's tokenizer.
        student: the student's tokenizer.
        vocab_sizes: rows of the teacher's and of the student's output layer.

    Raises:
        ConfigError: the tokenizers differ (the first difference is named), the models' vocabulary sizes
            differ, or a token has no row.
    """
    advice = "Distil into a student that uses its teacher's tokenizer."
    teacher_vocab, student_vocab = teacher.get_vocab(), student.get_vocab()
    if teacher_vocab != student_vocab:
        token = min(
            token
            for token in teacher_vocab.keys() | student_vocab.keys()
            if teacher_vocab.get(token) != student_vocab.get(token)
        )
        raise ConfigError(
            f"the teacher's tokenizer ({len(teacher_vocab)} tokens) and the student's ({len(student_vocab)} "
            f"tokens) differ: {token!r} is {teacher_vocab.get(token, 'absent')} for the teacher, "
            f"{student_vocab.get(token, 'absent')} for the student\n  {advice}"
        )
    encode = [t(_PROBE, add_special_tokens=False)["input_ids"] for t in (teacher, student)]
    if encode[0] != encode[1]:
        raise ConfigError(
            "the teacher's and the student's tokenizer have one vocabulary but split text differently: "
            f"{len(encode[0])} and {len(encode[1])} tokens for a probe sentence\n  {advice}"
        )
    if teacher.eos_token_id != student.eos_token_id:
        raise ConfigError(
            f"the end-of-text token is {teacher.eos_token_id} for the teacher, {student.eos_token_id} for "
            f"the student\n  {advice}"
        )
    if vocab_sizes[0] != vocab_sizes[1]:
        raise ConfigError(
            f"vocab_size is {vocab_sizes[0]} in the teacher's config.json, {vocab_sizes[1]} in the "
            "student's\n  Logits are compared one by one: the sizes must be equal."
        )
    check_vocabulary(student, vocab_sizes[1])


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> None:
    """Check that every token has a row in the embedding.

    Raises:
        ConfigError: one has none.
    """
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab_size:
        raise ConfigError(
            f"the tokenizer's largest token id is {largest}, but vocab_size in config.json is "
            f"{vocab_size}\n  The folder's tokenizer and weights do not belong together."
        )


def token_cache_name(sources: list[Source], text_key: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """File name of the token cache: a hash of the sources' names, sizes and times, and of the tokenizer."""
    facts = [tokenizer_fingerprint(tokenizer), text_key, *list_files(sources)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16] + ".npy"


def write_token_cache(
    path: Path,
    documents: Iterable[str],
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Tokenize documents into one array on disk, each followed by the end-of-text token.

    The array is written aside and renamed, so that a file of this name is always complete.

    Args:
        path: the .npy file to write; its folder exists.
        documents: texts.
        tokenizer: the models' tokenizer.
        vocab_size: decides the width of a stored token.
        on_progress: called with the number of tokens so far.
    """
    aside = path.with_suffix(".partial")
    try:
        with ArrayWriter(aside, token_dtype(vocab_size)) as array:
            for tokens in _encode(documents, tokenizer):
                array.append(tokens)
                if on_progress:
                    on_progress(array.count)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that holds every token of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class ArrayWriter:
    """Writes a one-dimensional array of unknown length as a `.npy` file, flushed to disk at the end.

    Args:
        path: the file to write.
        dtype: of its elements.
    """

    def __init__(self, path: Path, dtype: np.dtype):
        self._path, self._dtype = path, dtype
        self.count = 0

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        _write_npy_header(self._file, self._dtype, 0)
        self._start = self._file.tell()
        return self

    def append(self, values: Sequence[int]) -> None:
        """Write more elements."""
        array = np.asarray(values, dtype=self._dtype)
        self._file.write(array.tobytes())
        self.count += len(array)

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            _write_npy_header(self._file, self._dtype, self.count)
            assert self._file.tell() == self._start, "NumPy pads the header so that a longer shape fits"
            self._file.flush()
            os.fsync(self._file.fileno())


def _write_npy_header(file: Any, dtype: np.dtype, count: int) -> None:
    np.lib.format.write_array_header_1_0(
        file, {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    )


def _encode(documents: Iterable[str], tokenizer: "PreTrainedTokenizerBase") -> Iterator[list[int]]:
    eos = tokenizer.eos_token_id
    batch: list[str] = []

    def encoded() -> list[int]:
        rows = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        return [token for row in rows for token in (*row, eos)]

    for text in documents:
        batch.append(text)
        if len(batch) == _DOCUMENTS_PER_CALL or len(text) > 2**20:
            yield encoded()
            batch.clear()
    if batch:
        yield encoded()


class Windows(abc.ABC):
    """Rows of training data, numbered from 0, split into training and held-out ones, in a seeded order.

    Args:
        num_windows: rows in all.
        held_out: share of them kept for evaluation; at least one if it is not 0.
        seed: decides the split and the order.
        what: what makes so many windows, for messages.

    Raises:
        ConfigError: there are too few for one training window and the asked-for held-out ones.
    """

    def __init__(self, num_windows: int, *, held_out: float, seed: int, what: str):
        self.seed = seed
        num_held_out = max(1, round(num_windows * held_out)) if held_out else 0
        if num_windows <= num_held_out:
            raise ConfigError(
                f"`data` has {what}; {num_held_out + 1} are needed (1 to train on, {num_held_out} held out)\n"
                "  Give more text or a smaller sequence_length."
            )
        # RandomState and not Generator: its streams are frozen across NumPy versions.
        order = np.random.RandomState([seed, 0]).permutation(num_windows)
        self.held_out = np.sort(order[:num_held_out])
        self.training = np.sort(order[num_held_out:])
        self._epoch = -1
        self._order = self.training

    def training_window(self, sample: int) -> int:
        """The window that is trained on as number `sample`, counted from the start of the run."""
        epoch, position = divmod(sample, len(self.training))
        if epoch != self._epoch:
            self._order = np.random.RandomState([self.seed, 1 + epoch]).permutation(self.training)
            self._epoch = epoch
        return int(self._order[position])

    @abc.abstractmethod
    def batch(self, windows: Sequence[int], device: "torch.device") -> "Batch":
        """The micro-batch of these windows."""

    def describe(self) -> list[str]:
        """Lines for the user about what was made of the data."""
        return []

    @abc.abstractmethod
    def digest(self) -> str:
        """SHA-256 of all data: two runs with equal digests and seeds see equal batches."""


class PackedWindows(Windows):
    """A token array cut into windows, split into training and held-out ones, in a seeded order.

    Window i holds tokens [i * S, i * S + S]: S + 1 tokens, of which the last is the first of window i + 1, so
    that every token but the first is predicted once. With S = 4 and the tokens a b c d e f g h i there are
    two windows, abcde and efghi; the first predicts b c d e from a b c d.

    Args:
        path: a file of `write_token_cache`.
        sequence_length: S.
        held_out: share of the windows kept for evaluation; at least one window if it is not 0.
        seed: decides the split and the order.

    Raises:
        ConfigError: the text is too short for one training window and the asked-for held-out ones.
    """

    def __init__(self, path: Path, *, sequence_length: int, held_out: float, seed: int):
        self.tokens = np.load(path, mmap_mode="r")
        self.sequence_length = sequence_length
        num_windows = max(0, (len(self.tokens) - 1) // sequence_length)
        super().__init__(
            num_windows,
            held_out=held_out,
            seed=seed,
            what=f"{len(self.tokens)} tokens, which makes {num_windows} windows of sequence_length "
            f"{sequence_length}",
        )

    def read(self, window: int) -> np.ndarray:
        """The S + 1 tokens of one window, int64."""
        start = window * self.sequence_length
        return self.tokens[start : start + self.sequence_length + 1].astype(np.int64)

    def batch(self, windows: Sequence[int], device: "torch.device") -> "Batch":
        """The micro-batch of these windows."""
        import torch

        windows_BT = torch.from_numpy(np.stack([self.read(window) for window in windows])).to(
            device
        )  # T = S + 1
        tokens_BS = windows_BT[:, :-1].contiguous()
        labels_BS = windows_BT[:, 1:].contiguous()
        positions_BS = torch.arange(tokens_BS.shape[1], device=device).expand_as(tokens_BS)
        return Batch(tokens_BS, labels_BS, positions_BS.contiguous())

    def digest(self) -> str:
        """SHA-256 of all tokens: two runs with equal digests and seeds see equal batches."""
        return digest_of_array(self.tokens)


def digest_of_array(array: np.ndarray) -> str:
    """SHA-256 of an array's type and content, which may be larger than memory."""
    digest = hashlib.sha256(array.dtype.str.encode())
    for start in range(0, len(array), 2**24):
        digest.update(array[start : start + 2**24].tobytes())
    return digest.hexdigest()


def prepare_windows(
    sources: list[Source],
    text_key: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    vocab_size: int,
    folder: Path,
    settings: "OptimizationConfig",
    on_progress: Callable[[int], None] | None = None,
) -> PackedWindows:
    """Tokenize the sources, unless their tokens are in `folder` already, and cut them into windows.

    Args:
        sources: see `find_sources`.
        text_key: the field of a record that holds its text.
        tokenizer: the model's tokenizer.
        vocab_size: rows of the model's output layer.
        folder: an existing folder for the tokens.
        settings: sequence_length, held_out and seed.
        on_progress: called with the number of tokens so far.

    Returns:
        The windows.

    Raises:
        ConfigError: a source is malformed, or there is too little text.
    """
    path = folder / token_cache_name(sources, text_key, tokenizer)
    if not path.exists():
        documents = (text for source in sources for text in read_documents(source, text_key))
        write_token_cache(path, documents, tokenizer, vocab_size, on_progress)
    return PackedWindows(
        path, sequence_length=settings.sequence_length, held_out=settings.held_out, seed=settings.seed
    )


def count_steps(settings: "OptimizationConfig", windows: Windows) -> int:
    """Optimizer steps of a run: `steps`, or as many as `epochs` need; at least one."""
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None, "the configuration has one of the two"
    return max(1, math.ceil(settings.epochs * len(windows.training) / settings.global_batch_size))


@dataclass(frozen=True)
class Batch:
    """One micro-batch: B windows of S tokens, or the tokens of them that a context-parallel rank works on."""

    tokens_BS: "torch.Tensor"  # int64, what the model reads
    labels_BS: "torch.Tensor"  # int64, the next token at each position
    positions_BS: "torch.Tensor"  # int64, 0 .. S-1

    def sample_bounds(self) -> list[tuple[int, int]]:
        """Begin and end of each sample of a row, all of which is here."""
        return [(0, self.tokens_BS.shape[1])]

    def take(self, places: "torch.Tensor") -> Self:
        """The same batch with these tokens of each row only (int64, their places in it)."""
        per_token = [field.name for field in dataclasses.fields(self) if "_BS" in field.name]
        places = places.to(self.tokens_BS.device)
        return dataclasses.replace(self, **{name: getattr(self, name)[:, places] for name in per_token})


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is cut over data-parallel ranks and micro-batches.

    Args:
        micro_batch_size: windows per forward.
        global_batch_size: windows per optimizer step over all ranks.
        data_rank: this rank's place among the data-parallel ranks.
        data_size: number of data-parallel ranks.
        context_rank: this rank's place among those that divide each sequence.
        context_size: number of ranks that divide each sequence.
    """

    micro_batch_size: int
    global_batch_size: int
    data_rank: int
    data_size: int
    context_rank: int = 0
    context_size: int = 1

    @classmethod
    def of_this_rank(cls, settings: "OptimizationConfig") -> Self:
        """The plan for this rank of Megatron's process groups."""
        from megatron.core import parallel_state

        return cls(
            micro_batch_size=settings.micro_batch_size,
            global_batch_size=settings.global_batch_size,
            data_rank=parallel_state.get_data_parallel_rank(),
            data_size=parallel_state.get_data_parallel_world_size(),
            context_rank=parallel_state.get_context_parallel_rank(),
            context_size=parallel_state.get_context_parallel_world_size(),
        )

    def own_part(self, batch: Batch) -> Batch:
        """What this rank works on of a micro-batch: its two chunks of each sample, see `megatron.zigzag`."""
        if self.context_size == 1:
            return batch
        from torpor.megatron.zigzag import zigzag_places

        return batch.take(zigzag_places(batch.sample_bounds(), self.context_size)[self.context_rank])

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per optimizer step on this rank."""
        return self.global_batch_size // (self.micro_batch_size * self.data_size)

    def samples(self, step: int) -> list[list[int]]:
        """This rank's sample numbers of `step` (0-based), one list per micro-batch."""
        first = step * self.global_batch_size
        return [
            [
                first + (micro * self.data_size + self.data_rank) * self.micro_batch_size + i
                for i in range(self.micro_batch_size)
            ]
            for micro in range(self.num_micro_batches)
        ]


def training_batches(windows: Windows, plan: BatchPlan, step: int, device: "torch.device") -> Iterator[Batch]:
    """This rank's micro-batches of optimizer step `step`, 0-based."""
    for samples in plan.samples(step):
        chosen = [windows.training_window(sample) for sample in samples]
        yield plan.own_part(windows.batch(chosen, device))


def held_out_batches(windows: Windows, plan: BatchPlan, step: int, device: "torch.device") -> Iterator[Batch]:
    """This rank's micro-batches of evaluation batch `step`, 0-based; starts again after the last window."""
    for samples in plan.samples(step):
        chosen = [int(windows.held_out[sample % len(windows.held_out)]) for sample in samples]
        yield plan.own_part(windows.batch(chosen, device))
