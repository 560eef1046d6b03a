"""Adding tensors to a Hugging Face folder that somebody else has just written, without writing it again.

Every step renames one file that is whole onto its place, and the index, which says what belongs to the model,
comes last: a process killed on the way leaves the folder as it was, or with everything.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from torpor.checkpoints.folder import (
    ASIDE_SUFFIX,
    CONFIG_NAME,
    INDEX_NAME,
    MAX_HEADER_ROOM,
    MIN_HEADER_ROOM,
    SINGLE_NAME,
    Folder,
    Shard,
    fsync_path,
    lock_folder,
    remove_abandoned,
    round_up,
)
from torpor.checkpoints.header import encode_entry
from torpor.errors import CheckpointError

# What the only file of a folder is called once there is another one; and those that are added. Trainers that
# write into a folder again remove files named like this, which belong to what they replace.
ONLY_SHARD_NAME = "model-00001-of-00001.safetensors"
ADDED_NAME = "model-mtp-{number:05d}-of-{total:05d}.safetensors"
MAX_SHARD_BYTES = 5 * 2**30


def add_tensors(
    folder: Folder,
    added: Mapping[str, tuple[Folder, str]],
    config: bytes | None = None,
    contents: Mapping[str, bytes] | None = None,
) -> None:
    """Add tensors to a folder, in files of their own; its other tensors stay where they are.

    `model.safetensors` is renamed, because readers that find it look no further; only where the file system
    has no hard links it keeps its name.

    Args:
        folder: The folder, opened; nothing else may write to it meanwhile.
        added: Name of each tensor to add, and the folder and name that its bytes come from.
        config: What config.json shall hold, None for what it holds.
        contents: What other files of these names shall hold.

    Raises:
        CheckpointError: Another process is doing the same, or a folder changed under our hands.
        OSError: It could not be written; the folder is as it was.
    """
    path = folder.path
    remove_abandoned(path / "mtp")
    aside = path / f".mtp.in-place{ASIDE_SUFFIX}"
    try:
        aside.mkdir()
    except FileExistsError:
        raise CheckpointError(
            f"another process is adding tensors to {path}, or one was killed where files cannot be locked\n"
            f"  If nothing is running, remove {aside}."
        ) from None
    lock = lock_folder(aside)
    try:
        _add_tensors(folder, added, config, contents or {}, aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _add_tensors(
    folder: Folder,
    added: Mapping[str, tuple[Folder, str]],
    config: bytes | None,
    contents: Mapping[str, bytes],
    aside: Path,
) -> None:
    path = folder.path
    files = {name: entry.file.name for name, entry in folder.tensors.items()}
    if added:
        shards = _write_shards(aside, added)
        if set(files.values()) == {SINGLE_NAME} and _link(path / SINGLE_NAME, aside / ONLY_SHARD_NAME):
            (aside / ONLY_SHARD_NAME).replace(path / ONLY_SHARD_NAME)
            files = dict.fromkeys(files, ONLY_SHARD_NAME)
        for number, (shard, names) in enumerate(shards, 1):
            target = path / ADDED_NAME.format(number=number, total=len(shards))
            shard.replace(target)
            files |= dict.fromkeys(names, target.name)
    for name, data in {**contents, **({} if config is None else {CONFIG_NAME: config})}.items():
        _replace(path / name, data, aside)
    if added:
        # Who wrote the trunk need not have made it durable, and the index vouches for it.
        for name in set(files.values()):
            fsync_path(path / name)
        fsync_path(path)
        _replace(path / INDEX_NAME, _index(folder, added, files), aside)
        fsync_path(path)
    # Also what a process left that was killed at this very place.
    single = path / SINGLE_NAME
    if SINGLE_NAME not in files.values() and single.exists():
        single.unlink()
        fsync_path(path)


def _write_shards(aside: Path, added: Mapping[str, tuple[Folder, str]]) -> list[tuple[Path, list[str]]]:
    """Write the tensors into files of at most `MAX_SHARD_BYTES`; return those, and which tensors each has."""
    room = sum(
        len(encode_entry(name, source.entry(old).dtype, source.entry(old).shape, 2**40, 2**40)) + 1
        for name, (source, old) in added.items()
    )
    room = round_up(min(max(room, MIN_HEADER_ROOM), MAX_HEADER_ROOM))
    shards: list[tuple[Path, list[str]]] = []
    shard: Shard | None = None
    try:
        for name, (source, old) in added.items():
            entry = source.entry(old)
            if shard and not shard.has_room(name, entry.dtype, entry.shape, entry.nbytes, MAX_SHARD_BYTES):
                shard.seal()
                shard.finish()
                shard = None
            if shard is None:
                file = aside / f"shard-{len(shards) + 1}"
                shard = Shard(file.open("xb"), room)
                shards.append((file, []))
            shard.write(name, entry.dtype, entry.shape, entry.nbytes, source.iter_bytes(old), entry)
            shards[-1][1].append(name)
        if shard:
            shard.seal()
            shard.finish()
    finally:
        if shard:
            shard.stream.close()
    return shards


def _index(folder: Folder, added: Mapping[str, tuple[Folder, str]], files: Mapping[str, str]) -> bytes:
    index = folder.path / INDEX_NAME
    said = json.loads(index.read_bytes()) if index.exists() else {}
    entries = [*folder.tensors.values(), *(source.entry(old) for source, old in added.values())]
    metadata = said.get("metadata")
    said["metadata"] = {
        **(metadata if isinstance(metadata, dict) else {}),
        "total_size": sum(entry.nbytes for entry in entries),
    }
    said["weight_map"] = dict(sorted(files.items()))
    return (json.dumps(said, indent=2) + "\n").encode()


def _link(file: Path, target: Path) -> bool:
    try:
        target.hardlink_to(file.resolve())
    except OSError:
        return False
    return True


def _replace(file: Path, data: bytes, aside: Path) -> None:
    new = aside / file.name
    with new.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)
