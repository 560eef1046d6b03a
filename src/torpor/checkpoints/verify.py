"""Does an export hold its source's MTP layers, byte for byte, and a whole trunk beside them?

Nothing but headers and raw bytes is read, in pieces of a few MiB, and no tensor is ever built.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from torpor.checkpoints.config_fields import NESTED, Config
from torpor.checkpoints.families import MTPLayerCount, count_mtp_layers, family_of
from torpor.checkpoints.family import Family
from torpor.checkpoints.folder import Folder, open_folder
from torpor.checkpoints.header import TensorEntry
from torpor.checkpoints.inspect import quantization_problems
from torpor.checkpoints.quantization import is_quantized, plain_name
from torpor.errors import CheckpointError

# Each holds a few pieces of a few MiB.
MAX_READERS = 8

Progress = Callable[[int, int], None]
State = Literal["identical", "differing", "missing", "unexpected"]


@dataclass(frozen=True)
class MTPTensor:
    """What was found about one MTP tensor.

    Attributes:
        name: Its name.
        state: How the export's compares with the source's.
        source: Where it lies in the source; None for an unexpected one.
        export: Where it lies in the export; None for a missing one.
        source_sha256: Of its bytes in the source.
        export_sha256: Of its bytes in the export.
    """

    name: str
    state: State
    source: TensorEntry | None
    export: TensorEntry | None
    source_sha256: str | None
    export_sha256: str | None


@dataclass(frozen=True)
class VerifyResult:
    """Everything that a verification found.

    Attributes:
        source: The source folder.
        export: The exported folder.
        family: The models' family.
        mtp: Every MTP tensor of either folder, copies of the trunk's excepted.
        copies: Tensors inside the source's MTP layers that are copies of its trunk's.
        stale_copies: Those that are not, in the export, what the export's trunk now is.
        trunk_tensors: Trunk tensors of the source.
        trunk_changed: Those whose bytes differ in the export.
        trunk_missing: Those that the export lacks.
        trunk_unexpected: Trunk tensors that only the export has.
        trunk_mismatched: Those whose dtype or shape differ in the export.
        quantization_problems: What is wrong with how the export says that its heads are quantised.
        source_count: The source's MTP layers.
        export_count: The export's.
        config_changed: Fields of config.json that only one of the two has or that differ; no verdict.
        export_sha256: Of every tensor of the export, where they were all hashed.
    """

    source: Path
    export: Path
    family: str
    mtp: tuple[MTPTensor, ...]
    copies: tuple[str, ...]
    stale_copies: tuple[str, ...]
    trunk_tensors: int
    trunk_changed: int
    trunk_missing: tuple[str, ...]
    trunk_unexpected: tuple[str, ...]
    trunk_mismatched: tuple[str, ...]
    quantization_problems: tuple[str, ...]
    source_count: MTPLayerCount
    export_count: MTPLayerCount
    config_changed: tuple[str, ...]
    export_sha256: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether the export may be shipped."""
        mtp_ok = all(tensor.state == "identical" for tensor in self.mtp) and not self.stale_copies
        trunk_ok = not (self.trunk_missing or self.trunk_unexpected or self.trunk_mismatched)
        return mtp_ok and trunk_ok and self.counts_ok and not self.quantization_problems

    @property
    def counts_ok(self) -> bool:
        """Whether both folders declare, hold and have completely written the same number of MTP layers."""
        same = self.source_count.declared == self.export_count.declared
        return same and self.source_count.agree and self.export_count.agree

    def mtp_names(self, state: State) -> list[str]:
        """Return the names of the MTP tensors in one state."""
        return [tensor.name for tensor in self.mtp if tensor.state == state]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values for `json.dumps`."""
        return {
            "ok": self.ok,
            "family": self.family,
            "mtp": {
                "tensors": sum(tensor.source is not None for tensor in self.mtp),
                "identical": len(self.mtp_names("identical")),
                "differing": self.mtp_names("differing"),
                "missing": self.mtp_names("missing"),
                "unexpected": self.mtp_names("unexpected"),
                "sha256": {t.name: t.source_sha256 for t in self.mtp if t.source_sha256},
            },
            "copies": {"tensors": len(self.copies), "stale": list(self.stale_copies)},
            "trunk": {
                "tensors": self.trunk_tensors,
                "changed": self.trunk_changed,
                "missing": list(self.trunk_missing),
                "unexpected": list(self.trunk_unexpected),
                "mismatched": list(self.trunk_mismatched),
            },
            "quantization": {"problems": list(self.quantization_problems)},
            "config": _count_json(self.export_count),
            "config_changed": list(self.config_changed),
            "source_config": _count_json(self.source_count),
        }


def verify_folders(
    source: str | Path, export: str | Path, progress: Progress | None = None, hash_all: bool = False
) -> VerifyResult:
    """Compare an exported folder with the one it was made from.

    Args:
        source: The folder that training started from.
        export: The folder that was written afterwards.
        progress: Called after each tensor with the bytes of the source dealt with so far, and all there are.
        hash_all: Whether to hash every tensor of the export, as a receipt needs it.

    Raises:
        CheckpointError: A folder cannot be read, the source has no MTP layers to verify, or the two are of
            different families.
        UnsupportedModelError: A family we do not know.
    """
    source_folder, export_folder = open_folder(source), open_folder(export)
    family = family_of(source_folder)
    exported = family_of(export_folder)
    if exported is not family:
        raise CheckpointError(
            f"{export_folder.path} is a {exported.name!r},"
            f" its source {source_folder.path} a {family.name!r}\n"
            "  One of the two folders is not the one that was meant."
        )
    return compare_folders(source_folder, export_folder, family, progress, hash_all)


def compare_folders(
    source: Folder,
    export: Folder,
    family: Family,
    progress: Progress | None = None,
    hash_all: bool = False,
) -> VerifyResult:
    """Compare two opened folders of one family.

    Tensors are read in parallel, in pieces, so that memory does not grow with the folders.

    Args:
        source: The folder that training started from.
        export: The folder that was written afterwards.
        family: Says what is MTP in them, and what may be a copy of the trunk's.
        progress: As in `verify_folders`.
        hash_all: Whether to hash every tensor of the export, and not only to compare the trunk's.

    Raises:
        CheckpointError: The source has no MTP layers, or a folder changed under our hands.
    """
    source_count, export_count = count_mtp_layers(source), count_mtp_layers(export)
    if not source_count.declared and not source_count.physical:
        raise CheckpointError(
            f"{source.path} has no MTP layers, so nothing about them can be verified\n"
            "  The first argument is the folder that training started from."
        )
    mtp, trunk = family.sort({**source.tensors, **export.tensors}, source.config)
    sizes = {name: folder.tensors[name].nbytes for folder in (export, source) for name in folder.tensors}
    with ThreadPoolExecutor(num_readers()) as pool:
        copy_of = find_copies(source, family)
        findings: dict[str, Finding] = {}
        done, total = 0, sum(entry.nbytes for entry in source.tensors.values())
        reader = _Reader(source, export, frozenset(mtp), copy_of, hash_all)
        # The largest first: none is left over at the end, when the other readers have nothing more to do.
        tasks = [pool.submit(reader.read, name) for name in sorted(sizes, key=lambda n: (-sizes[n], n))]
        try:
            for task in as_completed(tasks):
                finding = task.result()
                findings[finding.name] = finding
                if progress and finding.name in source.tensors:
                    done += source.tensors[finding.name].nbytes
                    progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise

    trunk.sort()
    missing, unexpected = _compare_names(source, export, trunk)
    mismatched = [name for name in trunk if findings[name].state == "mismatched"]
    export_mtp, export_trunk = family.sort(export.tensors, export.config)
    return VerifyResult(
        source=source.path,
        export=export.path,
        family=family.name,
        mtp=tuple(
            _describe_mtp(source, export, findings[name]) for name in sorted(mtp) if name not in copy_of
        ),
        copies=tuple(sorted(copy_of)),
        stale_copies=tuple(name for name in sorted(copy_of) if findings[name].state != "identical"),
        trunk_tensors=sum(name in source.tensors for name in trunk),
        trunk_changed=sum(findings[name].state in ("differing", "requantized") for name in trunk),
        trunk_missing=tuple(missing),
        trunk_unexpected=tuple(unexpected),
        trunk_mismatched=tuple(mismatched),
        quantization_problems=tuple(quantization_problems(export, family, export_mtp, export_trunk)),
        source_count=source_count,
        export_count=export_count,
        config_changed=tuple(_changed_fields(source.config, export.config)),
        export_sha256={name: findings[name].export_sha256 or "" for name in export.tensors}
        if hash_all
        else {},
    )


def num_readers() -> int:
    """Return how many threads read and hash: one for each processor, few enough to bound the memory."""
    return min(len(os.sched_getaffinity(0)), MAX_READERS)


@dataclass(frozen=True)
class Finding:
    """How one tensor of the export compares with the source's.

    Attributes:
        name: Its name.
        state: The verdict; "mismatched" is another dtype or shape, "requantized" that on purpose.
        source_sha256: Of its bytes in the source, where they were hashed.
        export_sha256: Of its bytes in the export, where they were hashed.
    """

    name: str
    state: State | Literal["mismatched", "requantized"]
    source_sha256: str | None = None
    export_sha256: str | None = None


@dataclass(frozen=True)
class _Reader:
    """Compares one tensor at a time; several threads share it."""

    source: Folder
    export: Folder
    mtp: Collection[str]
    copy_of: Mapping[str, str]
    hash_all: bool

    def read(self, name: str) -> Finding:
        before, after = self.source.tensors.get(name), self.export.tensors.get(name)
        if name in self.copy_of:
            follows = are_equal(self.export, name, self.export, self.copy_of[name])
            after_sha256 = self.export.sha256(name) if after and self.hash_all else None
            return Finding(name, "identical" if follows else "differing", None, after_sha256)
        alike = _are_alike(self.source, name, self.export, name)
        if name in self.mtp or self.hash_all:
            before_sha256 = self.source.sha256(name) if before else None
            after_sha256 = self.export.sha256(name) if after else None
            equal = alike and before_sha256 == after_sha256
        else:
            before_sha256 = after_sha256 = None
            equal = alike and are_equal(self.source, name, self.export, name)
        if not before:
            return Finding(name, "unexpected", None, after_sha256)
        if not after:
            return Finding(name, "missing", before_sha256, None)
        if equal:
            return Finding(name, "identical", before_sha256, after_sha256)
        if alike or name in self.mtp:
            return Finding(name, "differing", before_sha256, after_sha256)
        quantized = is_quantized(self.source.tensors, name) != is_quantized(self.export.tensors, name)
        return Finding(name, "requantized" if quantized else "mismatched", before_sha256, after_sha256)


def _describe_mtp(source: Folder, export: Folder, finding: Finding) -> MTPTensor:
    # An MTP tensor of another dtype or shape is a differing one.
    state = cast(State, finding.state)
    before, after = source.tensors.get(finding.name), export.tensors.get(finding.name)
    return MTPTensor(finding.name, state, before, after, finding.source_sha256, finding.export_sha256)


def _compare_names(source: Folder, export: Folder, trunk: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the trunk tensors that the export lacks, and those that only it has.

    A weight that was quantised, or is no longer, goes by another name and has other company; it is the
    same weight.
    """

    def plain_names(folder: Folder) -> set[str | None]:
        return {plain_name(name) for name in trunk if name in folder.tensors}

    before, after = plain_names(source), plain_names(export)
    requantized = {
        module
        for name in trunk
        if (plain := plain_name(name)) in before & after
        and plain is not None
        and is_quantized(source.tensors, name) != is_quantized(export.tensors, name)
        for module in [plain.removesuffix(".weight")]
    }

    def is_accounted_for(name: str, elsewhere: set[str | None]) -> bool:
        plain = plain_name(name)
        if plain is None:  # what lies beside a weight comes and goes with how it is packed
            return any(
                name.startswith(f"{module}.") for module in _modules_around(name) if module in requantized
            )
        return plain in elsewhere and plain.removesuffix(".weight") in requantized

    missing = [n for n in trunk if n not in export.tensors and not is_accounted_for(n, after)]
    unexpected = [n for n in trunk if n not in source.tensors and not is_accounted_for(n, before)]
    return missing, unexpected


def _modules_around(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def find_copies(source: Folder, family: Family) -> dict[str, str]:
    """Return the MTP tensors that are their trunk's, byte for byte, and of which tensor each is a copy.

    Args:
        source: A folder in which nothing has been trained since the copies were made.
        family: Its family.

    Raises:
        CheckpointError: The folder changed under our hands.
    """
    candidates = family.copy_candidates(source.tensors, source.config)
    return {name: trunk for name, trunk in candidates if are_equal(source, name, source, trunk)}


def _are_alike(one: Folder, one_name: str, other: Folder, other_name: str) -> bool:
    """Whether both tensors exist, with the same dtype and shape."""
    a, b = one.tensors.get(one_name), other.tensors.get(other_name)
    return a is not None and b is not None and (a.dtype, a.shape) == (b.dtype, b.shape)


def are_equal(one: Folder, one_name: str, other: Folder, other_name: str) -> bool:
    """Whether both tensors exist, with the same dtype, shape and bytes; reads no further than they agree."""
    if not _are_alike(one, one_name, other, other_name):
        return False
    pieces = zip(one.iter_bytes(one_name), other.iter_bytes(other_name), strict=True)
    # A bytearray is compared with the other side at once, a memoryview element by element.
    return all(bytearray(a) == b for a, b in pieces)


def _changed_fields(before: Config, after: Config) -> list[str]:
    """Return the fields of config.json that differ; those of a configuration inside it after its name."""
    changed = []
    for field in sorted(before.keys() | after.keys()):
        one, other = before.get(field), after.get(field)
        if field in NESTED and isinstance(one, dict) and isinstance(other, dict):
            changed += [f"{field}.{inner}" for inner in _changed_fields(one, other)]
        # As JSON: 1, 1.0 and true are equal to Python.
        elif (field in before) != (field in after) or json.dumps(one) != json.dumps(other):
            changed.append(field)
    return changed


def _count_json(count: MTPLayerCount) -> dict[str, int | None]:
    return {"declared": count.declared, "physical": count.physical, "written": count.written}
