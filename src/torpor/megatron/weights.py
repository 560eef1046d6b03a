"""Weights between Hugging Face folders and Megatron: sliced into any layout, exported in global space."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from torpor.checkpoints.families import find_family
from torpor.checkpoints.folder import Folder, FolderWriter
from torpor.checkpoints.name_map import StackExperts
from torpor.errors import CheckpointError, ConfigError, MTPChangedError
from torpor.megatron.quantized_export import QuantizedExport, quantized_export

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.transformer.module import MegatronModule
    from torch.distributed.checkpoint.api import CheckpointException

    from torpor.checkpoints.name_map import Entry, NameMap

SHARDING_METADATA = {"non_homogeneous_layers": True}
"""How every sharded state dict here is built: one key for each layer, which is what the name maps list."""


def load_weights(chunks: Sequence[MegatronModule], folder: Folder) -> None:
    """Fill this rank's chunks from a Hugging Face folder, at whatever layout they were built.

    Each rank reads the tensors it holds a part of, cuts its part out of the global tensor and copies it in
    place, cast to the parameter's dtype. Every rank must call it.

    Args:
        chunks: This rank's chunks as `build_model` returns them, before DDP.
        folder: The opened folder.

    Raises:
        CheckpointError: A tensor of the folder is claimed by no module, a parameter or buffer has no tensor,
            or a shape differs.
    """
    name_map = find_family(folder.config).name_map(folder.config)
    name_map.check(folder.tensors)
    shards = [shard for chunk in chunks for shard in _local_shards(chunk)]
    _check_claimed(chunks, shards, name_map, folder)

    shards_of: dict[str, list[ShardedTensor]] = {}
    for shard in shards:
        shards_of.setdefault(shard.key, []).append(shard)
    for entry in name_map.entries:
        wanted = {name: shards_of[name] for name in entry.megatron_names if name in shards_of}
        for part, named_shards in _split_by_expert(entry, wanted):
            packed = part.op.pack([folder.read_tensor(name) for name in part.hf_names])
            for name, tensor in zip(part.megatron_names, packed, strict=True):
                for shard in named_shards.get(name, ()):
                    _copy(tensor, shard, folder)


def export_folder(
    checkpoint: Path,
    source: Folder,
    out: Path,
    *,
    mtp: Literal["source", "live"] = "source",
    quantize: str | None = None,
    is_trained: Callable[[str], bool] | None = None,
) -> None:
    """Write a distributed checkpoint as a Hugging Face folder with its source's names, dtypes and shapes.

    Tensors are read in global space one map entry at a time, so memory is bounded by the largest of them and
    no process group is needed. `config.json` and the tokenizer are the source's, byte for byte; of a
    quantised checkpoint, `config.json` also says how, and so does `hf_quant_config.json` in Model-Optimizer's
    own formats.

    Args:
        checkpoint: Folder of one `torch_dist` checkpoint.
        source: The Hugging Face folder that the run started from.
        out: Folder to write; it must not exist.
        mtp: "source" for runs whose MTP layers slept: the checkpoint's MTP tensors must equal the source's,
            and the source's bytes are written; a checkpoint of a model built without MTP gets them too.
            "live" for runs that trained them: the checkpoint's are written.
        quantize: The format of weights that have quantisers in the checkpoint, "fp8", "int8" or "nvfp4";
            they are written in it, with their scales. None for a checkpoint without quantisers.
        is_trained: Says by name which Megatron tensors of the trunk were trained; of the others the source's
            bytes are written. None if all were.

    Raises:
        MTPChangedError: `mtp="source"` and an MTP tensor of the checkpoint differs from the source's.
        CheckpointError: A tensor is missing in the checkpoint or has the wrong shape, `out` exists, or
            whether weights have quantisers is not what `quantize` says.
    """
    family = find_family(source.config)
    name_map = family.name_map(source.config)
    name_map.check(source.tensors)
    live = _GlobalTensors(Path(checkpoint))
    mtp_names = {name for name in source.tensors if family.is_mtp(name, source.config)}
    has_mtp = any(
        _is_mtp(entry, mtp_names) and set(entry.megatron_names) & live.names for entry in name_map.entries
    )
    if mtp == "live" and mtp_names and not has_mtp:
        raise CheckpointError(
            f"{checkpoint} holds no MTP tensor to export; pass mtp='source' to keep the source's"
        )

    is_copied = {entry.hf_names: mtp == "source" and _is_mtp(entry, mtp_names) for entry in name_map.entries}
    quantized = _find_quantized(live, quantize, [e for e in name_map.entries if not is_copied[e.hf_names]])
    config, contents = (None, None) if quantized is None else quantized.describe(source)
    with FolderWriter(out, like=source, config=config, contents=contents) as writer:
        for entry in name_map.entries:
            if is_copied[entry.hf_names] or (is_trained and not any(map(is_trained, entry.megatron_names))):
                if has_mtp and _is_mtp(entry, mtp_names):
                    _check_mtp_unchanged(entry, live.read(entry), source)
                for name in entry.hf_names:
                    writer.copy(source, name)
                continue
            tensors = entry.op.unpack(live.read(entry))
            for name, tensor in zip(entry.hf_names, tensors, strict=True):
                expected = source.tensors[name].shape
                _check_shape(name, expected, tensor.shape, f"{checkpoint}, exported as")
            scales = quantized.scale_names(entry) if quantized is not None else None
            if quantized is not None and scales is not None:
                for name, tensor in quantized.pack(entry, tensors, live.load(scales)):
                    writer.add_tensor(name, tensor)
                continue
            for name, tensor in zip(entry.hf_names, tensors, strict=True):
                writer.add_tensor(name, tensor, dtype=source.tensors[name].dtype)


def _find_quantized(
    live: _GlobalTensors, quantize: str | None, entries: Sequence[Entry]
) -> QuantizedExport | None:
    if quantize is not None:
        return quantized_export(quantize, entries, live.names)
    scales = sorted(name for name in live.names if name.endswith("_quantizer._amax"))
    if scales:
        raise CheckpointError(
            f"{live.path} is of a quantised model: it holds {scales[0]} and {len(scales) - 1} more\n"
            "  Say in which format to export it: `quantize`."
        )
    return None


def write_folder(
    chunks: Sequence[MegatronModule],
    hf_config: Mapping[str, Any],
    out: Path,
    *,
    companions: Iterable[Path] = (),
) -> None:
    """Write a model that lives whole in this process as a new Hugging Face folder, in its own dtypes.

    For models that began with random weights and so have no source folder.

    Args:
        chunks: The chunks of a model built at tensor, pipeline and expert parallel size 1.
        hf_config: The config it was built from; becomes `config.json`.
        out: Folder to write; it must not exist.
        companions: Files to put beside the weights: tokenizer, generation settings.

    Raises:
        ConfigError: The model is spread over several ranks.
        CheckpointError: A parameter has no name in this family, or `out` exists.
    """
    name_map = find_family(hf_config).name_map(hf_config)
    live = _LocalTensors([shard for chunk in chunks for shard in _local_shards(chunk)])
    unnamed = sorted(live.names - set(name_map.by_megatron))
    if unnamed:
        raise CheckpointError(f"{unnamed[0]} has no name in a Hugging Face folder of this family")
    with FolderWriter(out, config=dict(hf_config), companions=companions) as writer:
        for entry in name_map.entries:
            for name, tensor in zip(entry.hf_names, entry.op.unpack(live.read(entry)), strict=True):
                writer.add_tensor(name, tensor)


# --- this rank's shards ---------------------------------------------------------------------------------


def _local_shards(chunk: MegatronModule) -> list[ShardedTensor]:
    """List the parts of global tensors that a chunk holds, as views of its parameters and buffers.

    Raises:
        CheckpointError: A parameter or buffer of the chunk is in no part, or only partly.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    shards: list[ShardedTensor] = []
    covered: set[int] = set()
    for item in chunk.sharded_state_dict(metadata=dict(SHARDING_METADATA)).values():
        if isinstance(item, ShardedTensorFactory):
            parts = [part for part in _flatten(item.build()) if isinstance(part, ShardedTensor)]
        elif isinstance(item, ShardedTensor):
            parts = [item]
        else:  # ShardedObject: extra state of a Transformer Engine layer, which Hugging Face folders lack
            continue
        storage = item.data.untyped_storage().data_ptr()
        is_view = all(part.data.untyped_storage().data_ptr() == storage for part in parts)
        if not is_view or sum(part.data.numel() for part in parts) != item.data.numel():
            raise CheckpointError(f"{item.key}: its parts in the sharded state dict do not cover it in place")
        covered.add(item.data.data_ptr())
        shards += parts
    for name, tensor in chunk.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and tensor.numel() and tensor.data_ptr() not in covered:
            raise CheckpointError(f"{name} is a tensor of the model that its sharded state dict leaves out")
    return shards


def _split_by_expert(
    entry: Entry, wanted: dict[str, list[ShardedTensor]]
) -> Iterable[tuple[Entry, dict[str, list[ShardedTensor]]]]:
    """Cut an entry down to what this rank holds: nothing, all of it, or each of its own experts alone."""
    if not wanted:
        return
    if not isinstance(entry.op, StackExperts):
        yield entry, wanted
        return
    (name,) = entry.megatron_names
    per_expert = len(entry.hf_names) // entry.op.num_experts
    for expert in sorted({shard.global_offset[0] for shard in wanted[name]}):
        own = slice(expert * per_expert, (expert + 1) * per_expert)
        one = replace(entry, hf_names=entry.hf_names[own], hf_shapes=entry.hf_shapes[own], op=entry.op.each)
        yield one, {name: [shard for shard in wanted[name] if shard.global_offset[0] == expert]}


def _copy(tensor: torch.Tensor, shard: ShardedTensor, folder: Folder) -> None:
    """Copy a shard's part of a tensor into it; of an expert's tensor, which has no expert dimension, too."""
    expert_dims = shard.prepend_axis_num
    _check_shape(shard.key, shard.global_shape[expert_dims:], tensor.shape, str(folder.path))
    with torch.no_grad():
        shard.data.copy_(tensor[shard.global_slice()[expert_dims:]])


def _flatten(nested: Any) -> list[Any]:
    if isinstance(nested, dict):
        nested = list(nested.values())
    if not isinstance(nested, (list, tuple)):
        return [nested]
    return [leaf for item in nested for leaf in _flatten(item)]


def _check_claimed(
    chunks: Sequence[MegatronModule], shards: Sequence[ShardedTensor], name_map: NameMap, folder: Folder
) -> None:
    """Compare what the modules of all ranks hold with what the folder's name map lists, both ways.

    All ranks compare the same, so that all of them raise or none.
    """
    held = {shard.key for shard in shards}
    if torch.distributed.is_initialized():
        everyone: list[set[str]] = [set()] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, held)
        held = set().union(*everyone)
    unknown = sorted(held - set(name_map.by_megatron))
    if unknown:
        raise CheckpointError(
            f"{folder.path} has no tensor for {unknown[0]} and {len(unknown) - 1} more of the model's\n"
            "  Build the model from the folder's own config.json."
        )
    family = find_family(folder.config)
    is_trunk_only = chunks[0].config.mtp_num_layers is None
    for entry in name_map.entries:
        if is_trunk_only and all(family.is_mtp(name, folder.config) for name in entry.hf_names):
            continue
        lost = [name for name in entry.megatron_names if name not in held]
        if lost:
            raise CheckpointError(
                f"{folder.path}: no module of the model holds {lost[0]}, so {entry.hf_names[0]} would be lost"
            )


def _check_shape(name: str, expected: Sequence[int], found: Sequence[int], where: str) -> None:
    if tuple(expected) != tuple(found):
        raise CheckpointError(f"{name} has shape {tuple(found)} in {where}; it must be {tuple(expected)}")


class _LocalTensors:
    """Whole tensors put together from the parts of one process that holds them all."""

    def __init__(self, shards: Sequence[ShardedTensor]):
        self._shards: dict[str, list[ShardedTensor]] = {}
        for shard in shards:
            self._shards.setdefault(shard.key, []).append(shard)
        self.names = set(self._shards)

    def read(self, entry: Entry) -> list[torch.Tensor]:
        return [self._read(name, entry) for name in entry.megatron_names]

    def _read(self, name: str, entry: Entry) -> torch.Tensor:
        if name not in self._shards:
            raise ConfigError(
                f"this process does not hold {name}, needed for {entry.hf_names[0]}\n  {_SPREAD}"
            )
        first, *rest = self._shards[name]
        whole = torch.empty(first.global_shape, dtype=first.dtype)
        if whole.numel() > sum(shard.data.numel() for shard in (first, *rest)):
            raise ConfigError(f"this process holds only a part of {name}\n  {_SPREAD}")
        with torch.no_grad():
            for shard in (first, *rest):
                whole[shard.global_slice()] = shard.data.cpu()
        return whole


_SPREAD = "The model is spread over several ranks: save a checkpoint and export that."


# --- distributed checkpoints in global space ------------------------------------------------------------


class _GlobalTensors:
    """Whole tensors of a `torch_dist` checkpoint, read one at a time, whatever layout wrote them."""

    def __init__(self, path: Path):
        from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

        class Reader(FileSystemReader):
            # Every load asks for the metadata again; parsing it once keeps the cost linear in the tensors.
            def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
                return metadata

        self.path = path
        if not (path / ".metadata").is_file():
            raise CheckpointError(
                f"{path} is not a complete distributed checkpoint: it has no .metadata file"
            )
        metadata = FileSystemReader(path).read_metadata()
        self._reader = Reader(path)
        self._stored = {
            name: stored
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.names = set(self._stored)

    def read(self, entry: Entry) -> list[torch.Tensor]:
        missing = [name for name in entry.megatron_names if name not in self.names]
        if missing:
            raise CheckpointError(f"{self.path} lacks {missing[0]}, needed for {entry.hf_names[0]}")
        return self.load(entry.megatron_names)

    def load(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Read tensors that are there."""
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.api import CheckpointException

        tensors = {
            name: torch.empty(self._stored[name].size, dtype=self._stored[name].properties.dtype)
            for name in names
        }
        try:
            checkpoint.load(tensors, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(f"{self.path} cannot be read: {first_cause(error)}") from error
        return list(tensors.values())


def first_cause(error: CheckpointException) -> str:
    """Say what went wrong first in a PyTorch checkpoint operation, whose own message is all tracebacks."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"{type(cause).__name__} on rank {rank}: {cause}"


def _is_mtp(entry: Entry, mtp_names: set[str]) -> bool:
    return all(name in mtp_names for name in entry.hf_names)


def _check_mtp_unchanged(entry: Entry, live: list[torch.Tensor], source: Folder) -> None:
    """Compare with what `load_weights` put there: the source's values, cast to the live dtype."""
    loaded = entry.op.pack([source.read_tensor(name) for name in entry.hf_names])
    for name, was, now in zip(entry.megatron_names, loaded, live, strict=True):
        before, after = _sha256(was.to(now.dtype)), _sha256(now)
        if was.shape != now.shape or before != after:
            raise MTPChangedError(
                f"{entry.hf_names[0]} ({name}) differs from its source {source.path}\n"
                f"  source sha256 {before[:12]}   checkpoint sha256 {after[:12]}\n"
                "  MTP layers were trained or damaged in this run; nothing was exported."
            )


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
