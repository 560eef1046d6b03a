"""Does an export hold its source's MTP layers, byte for byte, and a whole trunk beside them?

Nothing but headers and raw bytes is read, in pieces of a few MiB, and no tensor is ever built.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torpor.checkpoints.families import MTPLayerCount, count_mtp_layers, family_of
from torpor.checkpoints.family import Family
from torpor.checkpoints.folder import Folder, open_folder
from torpor.checkpoints.header import TensorEntry
from torpor.errors import CheckpointError

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
        source_count: The source's MTP layers.
        export_count: The export's.
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
    source_count: MTPLayerCount
    export_count: MTPLayerCount

    @property
    def ok(self) -> bool:
        """Whether the export may be shipped."""
        mtp_ok = all(tensor.state == "identical" for tensor in self.mtp) and not self.stale_copies
        trunk_ok = not (self.trunk_missing or self.trunk_unexpected or self.trunk_mismatched)
        return mtp_ok and trunk_ok and self.counts_ok

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
            "config": _count_json(self.export_count),
            "source_config": _count_json(self.source_count),
        }


def verify_folders(source: str | Path, export: str | Path, progress: Progress | None = None) -> VerifyResult:
    """Compare an exported folder with the one it was made from.

    Args:
        source: The folder that training started from.
        export: The folder that was written afterwards.
        progress: Called after each tensor with the bytes of the source dealt with so far, and all there are.

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
    return compare_folders(source_folder, export_folder, family, progress)


def compare_folders(
    source: Folder, export: Folder, family: Family, progress: Progress | None = None
) -> VerifyResult:
    """Compare two opened folders of one family.

    Args:
        source: The folder that training started from.
        export: The folder that was written afterwards.
        family: Says what is MTP in them, and what may be a copy of the trunk's.
        progress: As in `verify_folders`.

    Raises:
        CheckpointError: The source has no MTP layers, or a folder changed under our hands.
    """
    source_count, export_count = count_mtp_layers(source), count_mtp_layers(export)
    if not source_count.declared and not source_count.physical:
        raise CheckpointError(
            f"{source.path} has no MTP layers, so nothing about them can be verified\n"
            "  The first argument is the folder that training started from."
        )
    copy_of = _find_copies(source, family)
    stale = [name for name, trunk in copy_of.items() if not _are_equal(export, name, export, trunk)]

    in_source, in_export = set(source.tensors), set(export.tensors)
    total, done = sum(entry.nbytes for entry in source.tensors.values()), 0
    mtp, changed, mismatched, missing, unexpected = [], 0, [], [], []
    for name in sorted(in_source | in_export):
        if family.is_mtp(name, source.config):
            if name not in copy_of:
                mtp.append(_compare_mtp(source, export, name))
        elif name not in in_source:
            unexpected.append(name)
        elif name not in in_export:
            missing.append(name)
        elif not _are_alike(source, name, export, name):
            mismatched.append(name)
        else:
            changed += not _are_equal(source, name, export, name)
        if progress and name in in_source:
            done += source.tensors[name].nbytes
            progress(done, total)

    return VerifyResult(
        source=source.path,
        export=export.path,
        family=family.name,
        mtp=tuple(mtp),
        copies=tuple(sorted(copy_of)),
        stale_copies=tuple(sorted(stale)),
        trunk_tensors=sum(not family.is_mtp(name, source.config) for name in in_source),
        trunk_changed=changed,
        trunk_missing=tuple(missing),
        trunk_unexpected=tuple(unexpected),
        trunk_mismatched=tuple(mismatched),
        source_count=source_count,
        export_count=export_count,
    )


def _compare_mtp(source: Folder, export: Folder, name: str) -> MTPTensor:
    before, after = source.tensors.get(name), export.tensors.get(name)
    before_sha256 = source.sha256(name) if before else None
    after_sha256 = export.sha256(name) if after else None
    state: State
    if not before:
        state = "unexpected"
    elif not after:
        state = "missing"
    elif _are_alike(source, name, export, name) and before_sha256 == after_sha256:
        state = "identical"
    else:
        state = "differing"
    return MTPTensor(name, state, before, after, before_sha256, after_sha256)


def _find_copies(source: Folder, family: Family) -> dict[str, str]:
    """Return the MTP tensors that are their trunk's, byte for byte, and of which tensor each is a copy."""
    candidates = family.copy_candidates(source.tensors, source.config)
    return {name: trunk for name, trunk in candidates if _are_equal(source, name, source, trunk)}


def _are_alike(one: Folder, one_name: str, other: Folder, other_name: str) -> bool:
    """Whether both tensors exist, with the same dtype and shape."""
    a, b = one.tensors.get(one_name), other.tensors.get(other_name)
    return a is not None and b is not None and (a.dtype, a.shape) == (b.dtype, b.shape)


def _are_equal(one: Folder, one_name: str, other: Folder, other_name: str) -> bool:
    """Whether both tensors exist, with the same dtype, shape and bytes; reads no further than they agree."""
    if not _are_alike(one, one_name, other, other_name):
        return False
    pieces = zip(one.iter_bytes(one_name), other.iter_bytes(other_name), strict=True)
    # A bytearray is compared with the other side at once, a memoryview element by element.
    return all(bytearray(a) == b for a, b in pieces)


def _count_json(count: MTPLayerCount) -> dict[str, int | None]:
    return {"declared": count.declared, "physical": count.physical, "written": count.written}
