"""Putting the MTP layers of one folder back onto a tuned one that lost them.

`graft_folder` makes a new folder and leaves both alone: the tuned folder's files are taken over as they are,
by reflink or hard link where that is possible, and only the MTP tensors, the index and what has to be mended
in the configuration are written. `graft_in_place` writes the same into the tuned folder.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torpor.checkpoints.config_fields import Config, text_config
from torpor.checkpoints.families import check_heads, count_mtp_layers, family_of, find_family
from torpor.checkpoints.family import Family, role_in_layer, split_prefix
from torpor.checkpoints.folder import Folder, FolderWriter, Placement, open_folder
from torpor.checkpoints.in_place import add_tensors
from torpor.checkpoints.inspect import quantization_configs, quantization_problems
from torpor.checkpoints.mended_config import exclude_heads, mend_config
from torpor.checkpoints.quantization import (
    find_quantization,
    has_scale,
    is_quantized,
    not_excluded,
    plain_name,
)
from torpor.checkpoints.verify import are_equal, find_copies
from torpor.errors import CheckpointError

Progress = Callable[[int, int], None]

# What has to be equal for heads to fit.
SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_layers")


@dataclass(frozen=True)
class GraftResult:
    """What a graft did.

    Attributes:
        heads: The folder that the MTP layers come from.
        trunk: The folder that they were put onto.
        out: The folder that was made.
        family: The models' family.
        mtp: MTP tensors taken from `heads`, byte for byte.
        copies: Tensors inside the MTP layers that copy the trunk, taken from `trunk`.
        kept: MTP tensors that `trunk` had already, as they have to be.
        written_bytes: Bytes of the tensors that were written.
        placed_bytes: Bytes of `trunk`'s files, by how they came to be in `out`.
        config_changes: Fields of config.json, and other files, that were changed.
    """

    heads: Path
    trunk: Path
    out: Path
    family: str
    mtp: tuple[str, ...]
    copies: tuple[str, ...]
    kept: tuple[str, ...]
    written_bytes: int
    placed_bytes: Mapping[Placement, int]
    config_changes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values for `json.dumps`."""
        return {
            "ok": True,
            "family": self.family,
            "out": str(self.out),
            "mtp": {"tensors": len(self.mtp), "kept": len(self.kept)},
            "copies": {"tensors": len(self.copies)},
            "written_bytes": self.written_bytes,
            "placed_bytes": dict(self.placed_bytes),
            "config_changes": list(self.config_changes),
        }


@dataclass(frozen=True)
class _Plan:
    """What goes into the new folder: name there, and which tensor of which folder it is."""

    from_heads: Mapping[str, str]
    from_trunk: Mapping[str, str]
    kept: tuple[str, ...]
    folder: Folder  # the new one as it will be, for asking what is right about it
    contents: Mapping[str, bytes]
    changes: tuple[str, ...]


def graft_folder(
    heads: str | Path, trunk: str | Path, out: str | Path, progress: Progress | None = None
) -> GraftResult:
    """Put the MTP layers of one folder onto another.

    Args:
        heads: The folder that has them: what the tuning started from.
        trunk: The tuned folder.
        out: The folder to make.
        progress: Called now and then with the bytes dealt with, and all there are.

    Raises:
        CheckpointError: A folder is damaged, the two do not fit, `trunk` has other MTP layers, `out` exists
            or cannot be written.
        UnsupportedModelError: A family, or a way of quantising, that we do not know.
    """
    source, tuned, family, plan = _open_and_plan(heads, trunk)
    if not plan.from_heads and not plan.from_trunk:
        raise CheckpointError(f"{tuned.path} has all MTP tensors of {source.path} already: nothing to graft")
    total = sum(entry.nbytes for entry in plan.folder.tensors.values())
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(min(done, total), total)

    config = None if plan.folder.config == tuned.config else plan.folder.config
    try:
        with FolderWriter(out, like=tuned, config=config, contents=plan.contents) as writer:
            placed: Counter[Placement] = writer.adopt(tuned, advance)
            for folder, names in ((source, plan.from_heads), (tuned, plan.from_trunk)):
                for new_name, name in names.items():
                    writer.copy(folder, name, new_name)
                    advance(folder.tensors[name].nbytes)
    except OSError as error:
        raise CheckpointError(
            f"{out} could not be written: {error}\n"
            "  Nothing is left of it, and neither of the two folders has been touched."
        ) from error
    return _result(source, tuned, Path(out), family, plan, placed)


def graft_in_place(heads: str | Path, folder: str | Path) -> GraftResult:
    """Put the MTP layers of one folder into another, which a trainer has just written without them.

    No tensor of the tuned folder is written again. A process killed on the way leaves the folder without
    heads or with them; calling this again finishes what it began. A folder that has its heads is left alone.

    Args:
        heads: The folder that has them: what the tuning started from.
        folder: The tuned folder; nothing else may write to it meanwhile.

    Raises:
        CheckpointError: A folder is damaged, the two do not fit, `folder` has other MTP layers or cannot be
            written.
        UnsupportedModelError: A family, or a way of quantising, that we do not know.
    """
    source, tuned, family, plan = _open_and_plan(heads, folder)
    added = {new: (source, name) for new, name in plan.from_heads.items()}
    added |= {new: (tuned, name) for new, name in plan.from_trunk.items()}
    # Written only if it says something else: the trainer's own file has its own layout.
    is_mended = dict(plan.folder.config) != dict(tuned.config)
    config = (json.dumps(dict(plan.folder.config), indent=2) + "\n").encode() if is_mended else None
    try:
        add_tensors(tuned, added, config, plan.contents)
    except OSError as error:
        raise CheckpointError(
            f"the MTP layers could not be written into {tuned.path}: {error}\n"
            f"  Its own tensors are untouched; `torpor graft --heads {source.path} --trunk {tuned.path}` puts"
            " the heads beside them in a new folder."
        ) from error
    return _result(source, tuned, tuned.path, family, plan, {})


def check_heads_fit(heads: str | Path, config: Config) -> None:
    """Refuse heads that will not fit a model, before it is trained.

    Args:
        heads: The folder that has them: what the training starts from.
        config: The model's configuration, as config.json would say it.

    Raises:
        CheckpointError: `heads` is damaged or has no whole MTP layers, or the model differs in family or
            sizes.
        UnsupportedModelError: A family, or a way of quantising, that we do not know.
    """
    source = open_folder(heads)
    _check_source(source, family_of(source))
    model_family = find_family(config)
    _check_sizes(source, model_family, config, "the model")
    quantization = find_quantization(config)
    if quantization is not None:
        not_excluded(quantization, [])


def _open_and_plan(heads: str | Path, trunk: str | Path) -> tuple[Folder, Folder, Family, "_Plan"]:
    _refuse_adapter(Path(trunk))
    source, tuned = open_folder(heads), open_folder(trunk)
    family = family_of(source)
    _check_fit(source, tuned, family)
    return source, tuned, family, _plan(source, tuned, family)


def _result(
    source: Folder, tuned: Folder, out: Path, family: Family, plan: _Plan, placed: Mapping[Placement, int]
) -> GraftResult:
    new = (*plan.from_heads, *plan.from_trunk)
    return GraftResult(
        heads=source.path,
        trunk=tuned.path,
        out=out,
        family=family.name,
        mtp=tuple(plan.from_heads),
        copies=tuple(plan.from_trunk),
        kept=plan.kept,
        written_bytes=sum(plan.folder.tensors[name].nbytes for name in new),
        placed_bytes=dict(placed),
        config_changes=plan.changes,
    )


def _refuse_adapter(path: Path) -> None:
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise CheckpointError(
            f"{path} is a LoRA adapter, not a model\n"
            "  Merge it into its base model first (merge_and_unload, save_pretrained), then graft onto that."
        )


def _check_source(source: Folder, family: Family) -> None:
    """Refuse a folder without whole MTP layers.

    Raises:
        CheckpointError: It has none, or not those that it declares.
    """
    if not family.physical_mtp_layers(source.tensors, source.config):
        raise CheckpointError(
            f"{source.path} has no MTP layers\n  Heads come from the folder that the tuning started from."
        )
    check_heads(source)


def _check_sizes(source: Folder, tuned_family: Family, tuned: Config, what: str) -> None:
    """Refuse a model of another family or size than the heads' own.

    Raises:
        CheckpointError: The two differ.
    """
    family = family_of(source)
    if tuned_family is not family:
        raise CheckpointError(f"{what} is a {tuned_family.name}, {source.path} a {family.name}")
    before, after = text_config(source.config), text_config(tuned)
    for field in SIZES:
        if field in before and before[field] != after.get(field):
            raise CheckpointError(
                f"{what} has {field} {after.get(field)!r}, {source.path} has {before[field]!r}\n"
                "  Heads fit only the trunk that they were trained with."
            )


def _check_fit(source: Folder, tuned: Folder, family: Family) -> None:
    """Refuse a tuned folder that the heads do not fit.

    Raises:
        CheckpointError: The two differ in family, sizes, or the tensors of the trunk.
    """
    _check_source(source, family)
    _check_sizes(source, family_of(tuned), tuned.config, str(tuned.path))

    def trunk_roles(folder: Folder) -> dict[str, tuple[str, str]]:
        """The language model's tensors: layer and role -> how it is named there."""
        roles = {}
        for name in family.sort(folder.tensors, folder.config)[1]:
            bare, plain = split_prefix(name)[1], plain_name(name)
            if plain and bare.startswith(("layers.", *OUTER)):
                layer = bare.split(".")[1] if bare.startswith("layers.") else ""
                roles[f"{layer} {role_in_layer(plain)}".strip()] = (name, plain)
        return roles

    have, need = trunk_roles(tuned), trunk_roles(source)
    missing = [name for role, (name, _) in need.items() if role not in have]
    if text_config(source.config).get("tie_word_embeddings", source.config.get("tie_word_embeddings")):
        missing = [name for name in missing if not name.endswith("lm_head.weight")]
    if missing:
        raise CheckpointError(
            f"{tuned.path} lacks {len(missing)} tensors of the trunk of {source.path}, first {missing[0]}\n"
            "  Heads fit only the whole trunk that they were trained with."
        )
    for role, (name, plain) in need.items():
        other, other_plain = have.get(role, (name, plain))
        a, b = source.tensors[name], tuned.tensors.get(other)
        if b is None or (plain, other_plain) != (name, other) or "experts" in role:
            continue  # packed, or experts put together differently: shapes say nothing
        if a.shape != b.shape and not (
            is_quantized(source.tensors, name) or is_quantized(tuned.tensors, other)
        ):
            raise CheckpointError(
                f"{other} in {tuned.path} has shape {list(b.shape)}, in {source.path} {list(a.shape)}\n"
                "  Heads fit only the trunk that they were trained with."
            )


# What a language model has outside its layers, without what it is wrapped in.
OUTER = ("embed_tokens.", "word_embeddings.", "embeddings.", "lm_head.", "norm.", "norm_f.")


def _plan(source: Folder, tuned: Folder, family: Family) -> _Plan:
    """Decide what the new folder holds, and make sure that it will be sound.

    Raises:
        CheckpointError: The tuned folder has other MTP tensors, or copies cannot follow its trunk.
        UnsupportedModelError: A way of quantising that we do not know.
    """
    mtp = family.sort(source.tensors, source.config)[0]
    new_names = _rename(source, tuned, family, mtp)
    copy_of = find_copies(source, family)
    roles = family.copy_roles(copy_of, source.config)
    from_heads: dict[str, str] = {}
    from_trunk: dict[str, str] = {}
    kept: list[str] = []
    for name in mtp:
        new_name = new_names[name]
        if name in copy_of:
            original = family.find_trunk(roles[name], tuned.tensors, tuned.config)
            if original is None or has_scale(tuned.tensors, original.removesuffix(".weight")):
                raise CheckpointError(
                    f"{name} is a copy of {copy_of[name]}, which {tuned.path} has quantised or not at all\n"
                    "  Quantise the trunk with its embedding and output layer left out."
                )
            folder, original_name, target = tuned, original, from_trunk
        else:
            folder, original_name, target = source, name, from_heads
        if new_name not in tuned.tensors:
            target[new_name] = original_name
        elif are_equal(tuned, new_name, folder, original_name):
            kept.append(new_name)
        else:
            raise CheckpointError(
                f"{tuned.path} has {new_name} already, and not as {folder.path} has {original_name}\n"
                "  Nothing is overwritten: these heads have been trained, or are another model's."
                " `torpor verify` lists every difference."
            )
    strange = set(family.sort(tuned.tensors, tuned.config)[0]) - set(new_names.values())
    if strange:
        raise CheckpointError(
            f"{tuned.path} has {len(strange)} MTP tensors that {source.path} lacks, first {min(strange)}\n"
            "  Nothing is removed: they belong to another model, or to another generation of this one."
        )

    tensors = dict(tuned.tensors)
    for folder, names in ((source, from_heads), (tuned, from_trunk)):
        for new_name, name in names.items():
            tensors[new_name] = replace(folder.tensors[name], name=new_name)
    config, changes = mend_config(source.config, tuned.config, family)
    merged = replace(tuned, tensors=MappingProxyType(tensors), config=config)
    _check_quantised_heads(source, tuned, mtp)
    merged, contents, excluded = exclude_heads(merged, family)
    _check_sound(merged, family, contents)
    return _Plan(from_heads, from_trunk, tuple(kept), merged, contents, (*changes, *excluded))


def _rename(source: Folder, tuned: Folder, family: Family, mtp: Collection[str]) -> dict[str, str]:
    """Return what the heads' tensors are called beside the tuned trunk, which may be wrapped otherwise.

    Raises:
        CheckpointError: Where they belong cannot be told.
    """
    source_trunk = family.sort(source.tensors, source.config)[1]
    heads_at = family.mtp_prefix(mtp, source_trunk)
    before, after = family.trunk_prefix(source_trunk), family.trunk_prefix(tuned.tensors)
    if before == after or not heads_at:
        return {name: name for name in mtp}
    if heads_at == before:
        return {name: after + name.removeprefix(before) for name in mtp}
    raise CheckpointError(
        f"the trunk of {source.path} lies under {before!r}, its heads under {heads_at!r}, and the trunk of"
        f" {tuned.path} under {after!r}\n"
        "  Where heads belong there cannot be told; write the tuned folder with its source's names."
    )


def _check_quantised_heads(source: Folder, tuned: Folder, mtp: Collection[str]) -> None:
    quantized = sorted(name for name in mtp if is_quantized(source.tensors, name))
    if not quantized:
        return
    methods = [
        {
            str(part.get("quant_method", part.get("quant_algo")))
            for part in quantization_configs(folder).values()
        }
        for folder in (source, tuned)
    ]
    if methods[0] != methods[1]:
        before, after = (", ".join(sorted(found)) or "none" for found in methods)
        raise CheckpointError(
            f"{quantized[0]} is quantised ({before}) and the trunk {tuned.path} is not so ({after})\n"
            "  No server reads both in one folder; take the heads from an unquantised folder."
        )


def _check_sound(merged: Folder, family: Family, contents: Mapping[str, bytes]) -> None:
    configs = quantization_configs(merged)
    for file, text in contents.items():
        configs[file] = find_quantization(json.loads(text)) or {}
    count = count_mtp_layers(merged)
    mtp, trunk = family.sort(merged.tensors, merged.config)
    problems = quantization_problems(merged, family, mtp, trunk, configs)
    if not count.agree:
        problems.append(
            f"{count.declared} MTP layers are declared, {count.physical} exist, {count.written} are complete"
        )
    if problems:
        raise CheckpointError(f"{merged.path} with these heads would not be sound: {problems[0]}")
