"""Training checkpoints: Megatron's `torch_dist` format, written aside, fsynced and renamed.

DIRECTORY/
    latest                      name of the newest whole checkpoint, replaced atomically
    step_00000100/              whole, because a rename put it there
        torpor.json             step, samples, schedule, layout, fingerprint
        metadata.json, .metadata, *.distcp   weights, optimizer, random states
    step_00000200.partial/      being written, or left by a kill; removed by the next save
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from torpor.checkpoints.folder import fsync_path
from torpor.errors import CheckpointError, ConfigError
from torpor.megatron.weights import SHARDING_METADATA, first_cause

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.transformer.module import MegatronModule

_logger = logging.getLogger(__name__)

_STATE_FILE, _LATEST_FILE, _PARTIAL = "torpor.json", "latest", ".partial"
_OPTIMIZER_METADATA = {
    # Model-shaped tensors, named as the parameters are: the format of Megatron's distributed optimizer that
    # does not depend on how it cut its buffers. See `_unpadded_offsets` for what has to be mended.
    "distrib_optim_sharding_type": "fully_reshardable",
}


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint says about the run that wrote it.

    Attributes:
        step: Optimizer steps done.
        consumed_samples: Sequences drawn from the training data.
        scheduler_state: State of the learning-rate schedule, as given to `save_checkpoint`.
        extra: Whatever else the caller stored; JSON values.
        fingerprint: The settings that a resumed run has to share.
        layout: Sizes `tensor`, `pipeline`, `expert`, `data` of the writing run.
        optimizer: "plain", "distributed" or None where no optimizer was saved.
    """

    step: int
    consumed_samples: int
    scheduler_state: dict[str, Any]
    extra: dict[str, Any]
    fingerprint: dict[str, Any]
    layout: dict[str, int] = field(default_factory=dict)
    optimizer: str | None = None


def save_checkpoint(
    directory: Path,
    step: int,
    chunks: Sequence[MegatronModule],
    optimizer: MegatronOptimizer | None = None,
    *,
    consumed_samples: int = 0,
    scheduler_state: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    fingerprint: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Save weights, optimizer, schedule and random states as the newest checkpoint of a directory.

    Every rank calls it. Until the last rename the checkpoint before this one stays the latest, whole.

    Args:
        directory: Holds the checkpoints of one run; it is made if it does not exist.
        step: Optimizer steps done; names the checkpoint.
        chunks: This rank's chunks, bare or wrapped in DDP. Frozen parameters are saved as all others.
        optimizer: Megatron's optimizer; None saves the weights alone.
        consumed_samples: Sequences drawn from the training data.
        scheduler_state: State of the learning-rate schedule; JSON values.
        extra: Anything else to give back at loading; JSON values.
        fingerprint: Settings that a resumed run has to share; JSON values.
        keep: How many checkpoints to leave in the directory, the new one included.

    Returns:
        Folder of the new checkpoint.

    Raises:
        CheckpointError: The directory already has a latest checkpoint of this step or a later one, or cannot
            be written. Every rank raises the same.
    """

    if keep < 1:
        raise ConfigError(
            f"keep is {keep}; at least the newest checkpoint has to be kept, so it must be 1 or more"
        )
    directory = Path(directory)
    final = directory / f"step_{step:08d}"
    partial = final.with_name(final.name + _PARTIAL)
    latest = find_latest(directory)
    if latest is not None and latest.name >= final.name:
        raise CheckpointError(
            f"{directory} already has {latest.name}, so step {step} cannot be saved after it; "
            "resume from it or save into another directory"
        )
    state = TrainingState(
        step,
        consumed_samples,
        dict(scheduler_state or {}),
        dict(extra or {}),
        dict(fingerprint or {}),
        _current_layout(),
        _optimizer_kind(optimizer),
    )

    def prepare() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # What an earlier kill left: unfinished saves, and a finished one that `latest` never came to name.
        for leftover in (*directory.glob(f"*{_PARTIAL}"), final):
            _remove(leftover)
        partial.mkdir()

    def publish() -> None:
        (partial / _STATE_FILE).write_text(json.dumps(asdict(state), indent=1) + "\n")
        for file in partial.iterdir():
            fsync_path(file)
        fsync_path(partial)
        partial.rename(final)
        fsync_path(directory)
        _point_to(directory, final.name)
        _prune(directory, keep)

    _on_rank_zero(prepare, f"{directory} cannot be written")
    _write_tensors(_sharded_state(chunks, optimizer, is_loading=False), partial)
    _on_rank_zero(publish, f"{partial} cannot be completed")
    return final


def find_latest(directory: Path) -> Path | None:
    """Return the newest whole checkpoint of a directory, None if it has none.

    Raises:
        CheckpointError: `latest` names a checkpoint that is not there or not whole.
    """
    pointer = Path(directory) / _LATEST_FILE
    try:
        name = pointer.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    checkpoint = pointer.parent / name
    whole = (_STATE_FILE, ".metadata", "metadata.json")
    missing = [file for file in whole if not (checkpoint / file).is_file()]
    if Path(name).name != name or missing:
        raise CheckpointError(
            f"{pointer} names {name!r}, which lacks {', '.join(missing) or 'a plain name'}\n"
            "  Put that checkpoint back, or write the name of a whole one into the file."
        )
    return checkpoint


def read_training_state(checkpoint: Path) -> TrainingState:
    """Read what a checkpoint says about its run, without touching its tensors.

    Raises:
        CheckpointError: The folder has no readable `torpor.json`.
    """
    path = Path(checkpoint) / _STATE_FILE
    try:
        return TrainingState(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not readable as the state of a training checkpoint: {error}"
        ) from error


def load_checkpoint(
    checkpoint: Path,
    chunks: Sequence[MegatronModule],
    optimizer: MegatronOptimizer | None = None,
    *,
    fingerprint: Mapping[str, Any] | None = None,
) -> TrainingState:
    """Load a checkpoint: with an optimizer to continue the run, without one for its weights at any layout.

    Every rank calls it. With an optimizer the random states are restored too, and what follows is bit for bit
    what would have followed without the interruption.

    Where MTP layers slept in the run that wrote the checkpoint and are awake in this one, the optimizer has
    state for them that the checkpoint lacks: it is made new, and a warning says so.

    Args:
        checkpoint: Folder of one checkpoint, for instance `find_latest(directory)`.
        chunks: This rank's chunks, bare or wrapped in DDP.
        optimizer: Megatron's optimizer of the resumed run; None loads weights alone.
        fingerprint: Settings of this run, compared with those of the run that wrote the checkpoint.

    Returns:
        The state that was saved with it.

    Raises:
        ConfigError: A setting in `fingerprint` differs from the saved one.
        CheckpointError: The checkpoint has other tensors than the model, or an optimizer is given and the
            checkpoint was written at another layout or by another kind of optimizer.
    """
    state = read_training_state(checkpoint)
    if fingerprint is not None:
        _check_fingerprint(checkpoint, state.fingerprint, fingerprint)
    if optimizer is not None:
        _check_resumable(checkpoint, state, optimizer)
    sharded = _sharded_state(chunks, optimizer, is_loading=True)
    if optimizer is not None and _has_new_mtp_state(checkpoint, sharded):
        # New state starts from the weights in the checkpoint, of which some optimizers hold FP32 copies.
        load_checkpoint(checkpoint, chunks)
        optimizer.reload_model_params()
        sharded = _sharded_state(chunks, optimizer, is_loading=True)
        _make_new_mtp_state(checkpoint, sharded)
    _check_tensors(checkpoint, sharded)
    loaded = _read_tensors(sharded, checkpoint)
    for index, chunk in enumerate(chunks):
        _unwrap(chunk).load_state_dict(loaded[f"model{index}"], strict=True)
    if optimizer is not None:
        _copies_as_lists(loaded["optimizer"])
        optimizer.load_state_dict(loaded["optimizer"])
        _set_random_state(loaded["random_state"])
    return state


# --- what is saved --------------------------------------------------------------------------------------


def _sharded_state(
    chunks: Sequence[MegatronModule], optimizer: MegatronOptimizer | None, *, is_loading: bool
) -> dict[str, Any]:
    metadata = {**SHARDING_METADATA, **_OPTIMIZER_METADATA}
    models = {
        f"model{index}": _unwrap(chunk).sharded_state_dict(metadata=dict(metadata))
        for index, chunk in enumerate(chunks)
    }
    sharded: dict[str, Any] = dict(models)
    if optimizer is not None:
        # The optimizer looks its parameters up in one flat dictionary of a single chunk.
        model = models["model0"] if len(models) == 1 else models
        sharded["optimizer"] = _sharded_optimizer(optimizer, model, metadata, is_loading=is_loading)
    if optimizer is not None or not is_loading:
        sharded["random_state"] = _sharded_random_state()
    return sharded


def _sharded_optimizer(
    optimizer: MegatronOptimizer, model: dict[str, Any], metadata: dict[str, Any], *, is_loading: bool
) -> Any:
    """Do what the optimizer's `sharded_state_dict` does, also where BF16 and FP32 parameters mix."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    def sharded_part(part: Any) -> Any:
        if isinstance(part, Float16OptimizerWithFloat16Params):
            return _sharded_mixed_optimizer(part, model, is_loading=is_loading)
        if not isinstance(part, DistributedOptimizer):
            return part.sharded_state_dict(model, is_loading, metadata=dict(metadata))
        _mend_group_order(part)
        with _unpadded_offsets(part):
            return part.sharded_state_dict(model, is_loading, metadata=dict(metadata))

    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(parts) == 1:
        return sharded_part(parts[0])
    optimizer._synchronize_steps()
    return {index: sharded_part(part) for index, part in enumerate(parts)}


@contextlib.contextmanager
def _unpadded_offsets(part: Any) -> Iterator[None]:
    """Let a distributed optimizer find its parameters in the buffers that it gathers for saving.

    It leaves out the padding between a buffer's buckets when it gathers, and looks parameters up where they
    are with the padding (megatron/core/optimizer/distrib_optimizer.py: `get_parameter_state_dp_zero` and
    `sharded_param_state_fully_reshardable`). Every bucket after the first is then saved from the wrong place,
    silently. Tied embeddings on two stages have such buckets, and so has MTP on a later stage.
    """
    padded = [buffer.param_index_map for buffer in part.buffers]
    try:
        for buffer in part.buffers:
            shifts, gathered = [], 0
            for bucket in buffer.buckets:
                shifts.append(gathered - bucket.offset)
                gathered += bucket.numel_unpadded
            buffer.param_index_map = {
                parameter: (start + shifts[bucket], end + shifts[bucket], bucket)
                for parameter, (start, end, bucket) in buffer.param_index_map.items()
            }
        yield
    finally:
        for buffer, index_map in zip(part.buffers, padded, strict=True):
            buffer.param_index_map = index_map


def _mend_group_order(part: Any) -> None:
    """Set right where a distributed optimizer looks for each parameter's state.

    It puts the FP32 parameters of a group before the BF16 ones and remembers the order before that
    (megatron/core/optimizer/distrib_optimizer.py, `_build_optimizer_group_ranges`), so that the states of
    Mamba's FP32 A_log and D would be taken for those of others.
    """
    for index, (fp32, bf16) in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
        for order, parameter in enumerate((*fp32, *bf16)):
            part.model_param_group_index_map[parameter] = (index, order)


def _sharded_mixed_optimizer(part: Any, model: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    """Build the sharded state of a BF16 optimizer some of whose parameters are FP32.

    Megatron's own (megatron/core/optimizer/optimizer.py, Float16OptimizerWithFloat16Params) numbers the BF16
    parameters alone and so takes the state of Mamba's FP32 A_log and D for that of others.
    """
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        make_sharded_optimizer_tensor,
        optim_state_to_sharding_state,
    )

    if is_loading:
        part.init_state_fn(part.optimizer, part.config)
    state = part.state_dict()
    model_parameter = {
        id(main): parameter
        for mains, parameters in zip(part.fp32_from_float16_groups, part.float16_groups, strict=True)
        for main, parameter in zip(mains, parameters, strict=True)
    }
    # The order in which PyTorch numbers them in a state dict.
    optimized = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    number = {id(parameter): index for index, parameter in enumerate(optimized)}
    sharded_parameter = get_param_id_to_sharded_param_map(
        model, [model_parameter.get(id(parameter), parameter) for parameter in optimized]
    )
    state["fp32_from_fp16_params"] = [
        [
            make_sharded_optimizer_tensor(
                sharded_parameter[number[id(main)]], main, prefix="optimizer.state.fp32_param"
            )
            for main in mains
        ]
        for mains in part.fp32_from_float16_groups
    ]
    step = part._extract_common_per_param_step(state["optimizer"])
    optim_state_to_sharding_state(state["optimizer"], sharded_parameter, exclude_keys="step")
    if step:
        state["optimizer"]["state"]["common_step"] = step
    return state


def _synchronous_strategy() -> Any:
    """Return Megatron's save strategy with PyTorch's own writer in place of the asynchronous one.

    Megatron's writer starts a manager process for every save, which imports the caller's `__main__` anew
    (megatron/core/dist_checkpointing/strategies/filesystem_async.py); the files are the same.
    """
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist
    from torch.distributed import checkpoint

    class SynchronousStrategy(torch_dist.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
            by_key, *_ = torch_dist._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, self.keep_only_main_replica
            )
            checkpoint.save(
                torch_dist.mcore_to_pyt_state_dict(by_key),
                storage_writer=checkpoint.FileSystemWriter(checkpoint_dir, sync_files=True),
                planner=torch_dist.MCoreSavePlanner(
                    dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
                ),
            )

    return SynchronousStrategy()


def _unwrap(chunk: torch.nn.Module) -> MegatronModule:
    from megatron.core.distributed import DistributedDataParallel

    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def _sharded_random_state() -> Any:
    from megatron.core import tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    state = {
        "python": random.getstate(),
        # As plain values and tensors, which loading accepts without unpickling foreign classes.
        "numpy": (kind, torch.from_numpy(keys.astype(numpy.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    world = torch.distributed.get_world_size()
    return ShardedObject("random_state", state, (world,), (_rank(),), replica_id=0)


def _set_random_state(state: dict[str, Any]) -> None:
    from megatron.core import tensor_parallel

    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


# --- whether it fits ------------------------------------------------------------------------------------


def _current_layout() -> dict[str, int]:
    from megatron.core import parallel_state

    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
    }


def _optimizer_kind(optimizer: MegatronOptimizer | None) -> str | None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if optimizer is None:
        return None
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return "distributed" if any(isinstance(part, DistributedOptimizer) for part in parts) else "plain"


def _check_fingerprint(checkpoint: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    # Through JSON, as the saved one went: tuples become lists.
    wanted = json.loads(json.dumps(dict(wanted)))
    differing = [key for key in sorted({*saved, *wanted}) if saved.get(key) != wanted.get(key)]
    if differing:
        lines = "".join(f"\n  {key}: {saved.get(key)!r} there, {wanted.get(key)!r} here" for key in differing)
        raise ConfigError(
            f"{checkpoint} was written with other settings{lines}\n"
            "  Use the same settings, or another output folder for a new run."
        )


def _check_resumable(checkpoint: Path, state: TrainingState, optimizer: MegatronOptimizer) -> None:
    kind, layout = _optimizer_kind(optimizer), _current_layout()
    if state.optimizer != kind:
        raise CheckpointError(
            f"{checkpoint} holds the state of {state.optimizer or 'no'} optimizer; this run's is {kind}\n"
            "  Use the same kind, or load the weights alone."
        )
    differing = [axis for axis in layout if state.layout.get(axis, 1) != layout[axis]]
    if differing:
        sizes = ", ".join(
            f"{axis} {state.layout.get(axis, 1)} there and {layout[axis]} here" for axis in differing
        )
        raise CheckpointError(
            f"{checkpoint} was written at another parallel layout: {sizes}; "
            "resume at the same layout, or load the weights alone"
        )


def _check_tensors(checkpoint: Path, sharded: dict[str, Any]) -> None:
    """Compare names and shapes with the checkpoint's, so that nothing is dropped and nothing stays unset."""
    from megatron.core.dist_checkpointing import load_tensors_metadata
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    wanted: dict[str, tuple[int, ...]] = {}
    for item in nested_values(sharded):
        built = item.build() if isinstance(item, ShardedTensorFactory) else item
        parts = nested_values({"parts": built}) if isinstance(built, (dict, list)) else [built]
        wanted |= {part.key: tuple(part.global_shape) for part in parts if isinstance(part, ShardedTensor)}
    # All ranks compare what all of them want, so that all of them raise or none.
    for other in _gather(wanted):
        wanted |= other

    stored = load_tensors_metadata(str(checkpoint))
    for name, shape in sorted(wanted.items()):
        if name not in stored:
            raise CheckpointError(
                f"{checkpoint} has no {name}, which this model or its optimizer needs\n"
                "  Build the model as the run that wrote it did, with or without MTP layers and quantisers."
            )
        if tuple(stored[name].global_shape) != shape:
            raise CheckpointError(
                f"{name} has shape {tuple(stored[name].global_shape)} in {checkpoint} and {shape} here"
            )
    unclaimed = sorted(
        name
        for name in set(stored) - set(wanted)
        if "optimizer" in sharded or not name.startswith("optimizer.")
    )
    if unclaimed:
        raise CheckpointError(
            f"{checkpoint} holds {unclaimed[0]} and {len(unclaimed) - 1} more that nothing here takes\n"
            "  Build the model as the run that wrote it did, with or without MTP layers and quantisers."
        )


# --- MTP layers that slept and are awake ----------------------------------------------------------------

_COPIES = "fp32_from_fp16_params"
_MTP_STATE = re.compile(r"optimizer\.state\.(?P<name>\w+)\.(?P<weight>mtp\..+)")


def _has_new_mtp_state(checkpoint: Path, sharded: dict[str, Any]) -> bool:
    """Say whether any rank's optimizer has state for MTP layers and the checkpoint has none at all."""
    from megatron.core.dist_checkpointing import load_tensors_metadata

    if any(_MTP_STATE.fullmatch(name) for name in load_tensors_metadata(str(checkpoint))):
        return False
    return any(_gather(bool(list(_mtp_state(sharded["optimizer"])))))


def _make_new_mtp_state(checkpoint: Path, sharded: dict[str, Any]) -> None:
    """Let the optimizer's state for MTP layers be made here and not be looked for in the checkpoint."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    models = {name: state for name, state in sharded.items() if name.startswith("model")}
    weights = {_places(item): item.data for item in nested_values(models) if hasattr(item, "key")}
    _copies_as_dicts(sharded["optimizer"])
    slots = list(_mtp_state(sharded["optimizer"]))
    for holder, place, match in slots:
        item = holder[place]
        if match["name"].startswith("exp_avg"):
            new = torch.zeros_like(item.data)
        else:  # an FP32 copy of the weight; what the distributed optimizer gives here is uninitialised
            weight = weights[_places(item, prefix=f"optimizer.state.{match['name']}.")]
            new = weight.detach().to(item.data.dtype, copy=True)
        holder[place] = LocalNonpersistentObject(new)
    count = sum(_gather(len({match["weight"] for _, _, match in slots})))
    if _rank() == 0:
        _logger.warning(
            "%s was written while MTP layers slept: the optimizer begins anew for %d MTP tensors, and goes on"
            " for all others",
            checkpoint,
            count,
        )


def _places(item: Any, prefix: str = "") -> tuple[Any, ...]:
    """Return the parts of global tensors that an item of a sharded state dict is; experts share a name."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    built = item.build() if isinstance(item, ShardedTensorFactory) else item
    parts = nested_values({"parts": built}) if isinstance(built, dict | list) else [built]
    return tuple((p.key.removeprefix(prefix), p.global_offset) for p in parts if isinstance(p, ShardedTensor))


def _copies_as_dicts(state: dict[str, Any]) -> None:
    """Number the FP32 copies of a BF16 optimizer: loading loses the places in lists that it fills in part."""
    for part in _parts(state):
        if _COPIES in part:
            part[_COPIES] = {i: dict(enumerate(group)) for i, group in enumerate(part[_COPIES])}


def _copies_as_lists(state: dict[str, Any]) -> None:
    """Undo `_copies_as_dicts`, where it was done."""
    for part in _parts(state):
        if isinstance(part.get(_COPIES), dict):
            groups = part[_COPIES]
            part[_COPIES] = [[groups[i][j] for j in sorted(groups[i])] for i in sorted(groups)]


def _parts(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return the states of a chain's optimizers, or of a single one."""
    return list(state.values()) if 0 in state else [state]


def _mtp_state(state: Any) -> Iterator[tuple[Any, Any, re.Match[str]]]:
    """Yield where in a sharded optimizer state MTP's part is: the dictionary or list, and the place in it."""
    places = state.items() if isinstance(state, dict) else enumerate(state)
    for place, item in list(places):
        if isinstance(item, dict | list):
            yield from _mtp_state(item)
        elif match := _MTP_STATE.fullmatch(getattr(item, "key", "") or ""):
            yield state, place, match


# --- all ranks together ---------------------------------------------------------------------------------


def _write_tensors(sharded: dict[str, Any], partial: Path) -> None:
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dist_checkpointing.save(
            sharded, str(partial), _synchronous_strategy(), content_metadata={"torpor": 1}
        )
    except CheckpointException as error:  # PyTorch raises it on every rank, whichever failed
        raise CheckpointError(f"{partial} cannot be written: {first_cause(error)}") from error


def _read_tensors(sharded: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    loaded, failure = {}, None
    try:
        loaded = dist_checkpointing.load(sharded, str(checkpoint))
    except CheckpointException as error:
        failure = first_cause(error)
    except Exception as error:  # a damaged file shows as whatever PyTorch trips over
        failure = f"{type(error).__name__}: {error}"
    for rank, message in enumerate(_gather(failure)):
        if message is not None:
            raise CheckpointError(
                f"{checkpoint} cannot be read by rank {rank}: {message}\n"
                "  Resume from another checkpoint of the run: write its name into `latest`."
            )
    return loaded


def _on_rank_zero(action: Callable[[], None], what: str) -> None:
    """Do something on rank 0 while the others wait; a failure there is raised on every rank."""
    failure = None
    if _rank() == 0:
        try:
            action()
        except OSError as error:
            failure = str(error)
    message = _gather(failure)[0]
    if message is not None:
        raise CheckpointError(f"{what}: {message}")


def _gather(value: Any) -> list[Any]:
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, value)
    return everyone


# --- files ----------------------------------------------------------------------------------------------


def _point_to(directory: Path, name: str) -> None:
    pointer = directory / _LATEST_FILE
    aside = pointer.with_name(pointer.name + _PARTIAL)
    aside.write_text(name + "\n")
    fsync_path(aside)
    aside.replace(pointer)
    fsync_path(directory)


def _prune(directory: Path, keep: int) -> None:
    whole = sorted(path for path in directory.glob("step_*") if not path.name.endswith(_PARTIAL))
    for path in whole[:-keep]:
        _remove(path)


def _remove(path: Path) -> None:
    """Delete a file or folder; a folder that looks whole stops doing so before its first file goes."""
    if path.is_file():
        path.unlink()
    elif path.is_dir():
        if not path.name.endswith(_PARTIAL):
            path = path.rename(path.with_name(path.name + _PARTIAL))
        shutil.rmtree(path)


def _rank() -> int:
    return torch.distributed.get_rank()
