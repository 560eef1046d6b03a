"""Fine-tuning data: samples on disk, rows of whole samples, micro-batches with a loss mask.

A sample of n tokens fills n - 1 places of a row: at each the model reads a token and predicts the next, and
the prediction counts if the next token is a response. With the tokens a b C D, and C D the response::

    tokens     a  b  C
    labels     b  C  D
    loss mask  0  1  1

Samples never see each other: positions restart with each, and a row that holds several says where they end.
"""

import bisect
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from torpor.errors import ConfigError
from torpor.training.chat import SampleEncoder
from torpor.training.data import (
    ArrayWriter,
    Batch,
    Windows,
    digest_of_array,
    token_dtype,
    tokenizer_fingerprint,
)
from torpor.training.sources import Source, list_files, read_records

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from torpor.training.config import SftConfig

_PLACES = "places.json"


@dataclass(frozen=True)
class SampleBatch(Batch):
    """One micro-batch of samples: B rows of S places. Padding is the token 0 at positions from 0."""

    loss_mask_BS: "torch.Tensor"  # float32, 1 where the label is a response token
    padding_mask_BS: "torch.Tensor"  # bool, True where there is no sample
    cu_seqlens: "torch.Tensor | None"  # int32, where the samples of a packed row end, from 0 to S; else None

    def sample_bounds(self) -> list[tuple[int, int]]:
        """Begin and end of each sample of a row, all of which is here."""
        if self.cu_seqlens is None:
            return super().sample_bounds()
        return list(itertools.pairwise(self.cu_seqlens.tolist()))


def write_samples(
    folder: Path,
    records: Iterable[tuple[str, Mapping[str, Any]]],
    encoder: SampleEncoder,
    vocab_size: int,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Encode records into arrays on disk, whole or not at all.

    Args:
        folder: to be made, beside others of its kind.
        records: place and content of each.
        encoder: see `SampleEncoder`.
        vocab_size: decides the width of a stored token.
        on_progress: called with the number of tokens so far.

    Raises:
        ConfigError: a record cannot be used; it is named.
    """
    aside = folder.with_suffix(".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    places: list[str] = []
    try:
        with (
            ArrayWriter(aside / "tokens.npy", token_dtype(vocab_size)) as tokens,
            ArrayWriter(aside / "is_response.npy", np.dtype("u1")) as is_response,
            ArrayWriter(aside / "ends.npy", np.dtype("<i8")) as ends,
        ):
            for where, record in records:
                sample = encoder.encode(record, where)
                tokens.append(sample.tokens)
                is_response.append(sample.is_response)
                ends.append([tokens.count])
                places.append(where)
                if on_progress:
                    on_progress(tokens.count)
        (aside / _PLACES).write_text(json.dumps(places), encoding="utf-8")
        aside.replace(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class Samples:
    """The arrays of `write_samples`.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path):
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.is_response = np.load(folder / "is_response.npy", mmap_mode="r")
        self.ends = np.load(folder / "ends.npy")
        self.starts = np.concatenate([[0], self.ends[:-1]]).astype(np.int64)
        self._folder = folder

    def __len__(self) -> int:
        return len(self.ends)

    def place(self, sample: int) -> str:
        """Where a sample's record stands, for messages."""
        return str(json.loads((self._folder / _PLACES).read_text(encoding="utf-8"))[sample])

    def digest(self) -> str:
        """SHA-256 of everything but the places."""
        parts = [digest_of_array(array) for array in (self.tokens, self.is_response, self.ends)]
        return hashlib.sha256("".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class SampleCounts:
    """What becomes of the samples.

    Args:
        used: samples that are in rows.
        too_long: samples longer than a row.
        without_response: samples left out because no response token is left in them.
        rows: rows made.
        filled: places of the rows that hold a token of a sample.
        response: places whose label is a response token.
        places: all places of the rows.
    """

    used: int
    too_long: int
    without_response: int
    rows: int
    filled: int
    response: int
    places: int

    def describe(self, strategy: str) -> list[str]:
        """Say what is trained on, and what is not."""
        lines = [
            f"{self.used:,} samples in {self.rows:,} rows, which they fill to {self.filled / self.places:.0%}"
            f"; {self.response / self.filled:.0%} of their tokens are responses"
        ]
        if self.too_long:
            verb = {"drop": "left out", "truncate": "cut off"}[strategy]
            lines.append(f"{self.too_long:,} samples longer than sequence_length are {verb}")
        if self.without_response:
            lines.append(f"{self.without_response:,} samples without a response token are left out")
        return lines


class SampleRows(Windows):
    """Samples laid into rows of S places, the rows split and ordered as windows are.

    Args:
        samples: the samples.
        sequence_length: S.
        packing: lay several samples into a row where they fit (best fit, longest first), instead of one.
        excess_length_strategy: what becomes of samples with more than S + 1 tokens: "raise", "drop", or
            "truncate", which keeps their beginning.
        held_out: share of the rows kept for evaluation; at least one row if it is not 0.
        seed: decides the split and the order.
        multiple_of: what the number of places of each sample is padded to a multiple of; divides S.

    Raises:
        ConfigError: a sample is too long and is not to be dropped or truncated, or there are too few rows.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        sequence_length: int,
        packing: bool,
        excess_length_strategy: Literal["raise", "drop", "truncate"],
        held_out: float,
        seed: int,
        multiple_of: int = 1,
    ):
        self._samples, self._packing, self._length = samples, packing, sequence_length
        self._strategy = excess_length_strategy
        # Places that a sample takes: one fewer than it has tokens.
        places = (samples.ends - samples.starts - 1).astype(np.int64)
        too_long = places > sequence_length
        if too_long.any() and excess_length_strategy == "raise":
            longest = int(places.argmax())
            raise ConfigError(
                f"`data`: {int(too_long.sum()):,} of {len(samples):,} samples are longer than sequence_length"
                f" {sequence_length}, the longest with {int(places[longest]) + 1:,} tokens at"
                f" {samples.place(longest)}\n"
                "  Use a larger sequence_length, or say what becomes of them with `excess_length_strategy:"
                " drop` or `excess_length_strategy: truncate`."
            )
        places = np.minimum(places, sequence_length)
        responses = np.array(
            [
                int(samples.is_response[start + 1 : start + 1 + count].sum())
                for start, count in zip(samples.starts, places, strict=True)
            ],
            dtype=np.int64,
        )
        kept = ~too_long | (excess_length_strategy == "truncate")
        chosen = np.flatnonzero(kept & (responses > 0))
        self._places, self._widths = places, -(-places // multiple_of) * multiple_of
        self._rows = (
            pack_best_fit(chosen, self._widths, sequence_length) if packing else [[int(i)] for i in chosen]
        )
        self.counts = SampleCounts(
            used=len(chosen),
            too_long=int(too_long.sum()),
            without_response=int(kept.sum()) - len(chosen),
            rows=len(self._rows),
            filled=int(places[chosen].sum()),
            response=int(responses[chosen].sum()),
            places=len(self._rows) * sequence_length,
        )
        super().__init__(
            len(self._rows),
            held_out=held_out,
            seed=seed,
            what=f"{len(chosen)} usable samples, which makes {len(self._rows)} rows of sequence_length "
            f"{sequence_length}",
        )

    def batch(self, windows: Sequence[int], device: "torch.device") -> SampleBatch:
        """The micro-batch of these rows."""
        import torch

        shape = (len(windows), self._length)
        tokens, labels, positions = (np.zeros(shape, np.int64) for _ in range(3))
        loss_mask, padding_mask = np.zeros(shape, np.float32), np.ones(shape, np.bool_)
        ends = [0]
        for row, window in enumerate(windows):
            place = 0
            for sample in self._rows[window]:
                start, count = int(self._samples.starts[sample]), int(self._places[sample])
                here = slice(place, place + count)
                tokens[row, here] = self._samples.tokens[start : start + count]
                labels[row, here] = self._samples.tokens[start + 1 : start + 1 + count]
                loss_mask[row, here] = self._samples.is_response[start + 1 : start + 1 + count]
                padding_mask[row, here] = False
                width = int(self._widths[sample])
                positions[row, place : place + width] = np.arange(width)
                place += width
                ends.append(place)
            if place < self._length:
                positions[row, place:] = np.arange(self._length - place)
                ends.append(self._length)
        arrays = (tokens, labels, positions, loss_mask, padding_mask)
        return SampleBatch(
            *(torch.from_numpy(array).to(device) for array in arrays),
            torch.tensor(ends, dtype=torch.int32, device=device) if self._packing else None,
        )

    def describe(self) -> list[str]:
        """Lines for the user about what became of the samples."""
        return self.counts.describe(self._strategy)

    def digest(self) -> str:
        """SHA-256 of the samples; how they lie in rows follows from the settings."""
        return self._samples.digest()


def pack_best_fit(chosen: Sequence[int], places: Sequence[int], capacity: int) -> list[list[int]]:
    """Lay samples into as few rows as best fit, longest first, gets them into.

    Args:
        chosen: numbers of the samples.
        places: what each sample takes, by number, at most `capacity`.
        capacity: of a row.

    Returns:
        The samples of each row, in the order of their lengths; the same for the same arguments.
    """
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # space left -> rows with that much
    spaces: list[int] = []  # the keys of it, ascending
    for sample in sorted((int(i) for i in chosen), key=lambda i: (-int(places[i]), i)):
        need = int(places[sample])
        at = bisect.bisect_left(spaces, need)
        if at == len(spaces):
            row, space = len(rows), capacity
            rows.append([])
        else:
            space = spaces[at]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        rows[row].append(sample)
        left = space - need
        if left:
            if left not in by_space:
                by_space[left] = []
                bisect.insort(spaces, left)
            by_space[left].append(row)
    return rows


def check_first_record(sources: list[Source], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Check that there is a record and that the first can be used, reading no further.

    Raises:
        ConfigError: every source is empty, or the first record cannot be used.
    """
    for source in sources:
        for where, record in read_records(source):
            SampleEncoder(tokenizer).encode(record, where)
            return
    names = ", ".join(str(source.path) for source in sources[:3]) + (", ..." if len(sources) > 3 else "")
    raise ConfigError(f"`data`: there is no record in {names}\n  Give files that hold records.")


def prepare_rows(
    sources: list[Source],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    vocab_size: int,
    folder: Path,
    settings: "SftConfig",
    on_progress: Callable[[int], None] | None = None,
) -> SampleRows:
    """Encode the sources, unless their samples are in `folder` already, and lay them into rows.

    Args:
        sources: see `find_sources`.
        tokenizer: the model's tokenizer.
        vocab_size: rows of the model's output layer.
        folder: an existing folder for the samples.
        settings: sequence_length, packing, excess_length_strategy, held_out and seed.
        on_progress: called with the number of tokens so far.

    Returns:
        The rows.

    Raises:
        ConfigError: a record cannot be used, a sample is too long, or there are too few.
    """
    facts = [tokenizer_fingerprint(tokenizer), str(tokenizer.chat_template), *list_files(sources)]
    path = folder / ("samples-" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16])
    if not path.exists():
        records = (record for source in sources for record in read_records(source))
        write_samples(path, records, SampleEncoder(tokenizer), vocab_size, on_progress)
    return SampleRows(
        Samples(path),
        sequence_length=settings.sequence_length,
        packing=settings.packing,
        excess_length_strategy=settings.excess_length_strategy,
        held_out=settings.held_out,
        seed=settings.seed,
        multiple_of=2 * settings.context_parallel if settings.context_parallel > 1 else 1,
    )
