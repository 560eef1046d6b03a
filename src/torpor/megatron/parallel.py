"""Process groups and random states of a run: how many ranks work on which part of the model."""

import dataclasses
import datetime
import gc
import os
import random
import tempfile
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from torpor.errors import ConfigError
from torpor.megatron.host import CPU, is_cpu_host, prepare_host

_owns_process_group = False
_rendezvous_folder: tempfile.TemporaryDirectory[str] | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks; what is left of the world is data parallel.

    Attributes:
        tensor: Ranks that share the weights of each layer.
        pipeline: Stages that the layers are divided into.
        expert: Ranks that the experts of each MoE layer are divided over.
        context: Ranks that each sequence is divided over, see `torpor.megatron.zigzag`.
        sequence_parallel: Whether the ranks of a tensor group also divide the sequence between layers.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert", "context"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} parallel size is {size!r}: it has to be a whole number from 1 up")
        if self.sequence_parallel and self.tensor == 1:
            raise ConfigError(
                "sequence_parallel is on with tensor parallel size 1\n"
                "  It divides the sequence over the tensor parallel ranks: use 2 or more, or turn it off."
            )

    def data(self, world_size: int) -> int:
        """Return the data parallel size that is left of a world.

        Raises:
            ConfigError: The world cannot be divided in this way.
        """
        stages = self.tensor * self.pipeline
        model = stages * self.context
        if world_size % model:
            context = f" x context {self.context}" if self.context > 1 else ""
            raise ConfigError(
                f"{world_size} ranks cannot be divided by tensor {self.tensor} x pipeline {self.pipeline}"
                f"{context} = {model}\n"
                f"  Start a multiple of {model} ranks, or choose sizes whose product divides {world_size}."
            )
        # Megatron keeps the experts' tensor parallel size equal to that of the other layers.
        expert_model = stages * self.expert
        if world_size % expert_model:
            axes = "data and context" if self.context > 1 else "data"
            raise ConfigError(
                f"{world_size} ranks cannot be divided by tensor {self.tensor} x pipeline {self.pipeline} x "
                f"expert {self.expert} = {expert_model}\n"
                f"  Experts are divided over the {world_size // stages} {axes} parallel ranks:\n"
                "  choose an expert parallel size that divides that number."
            )
        return world_size // model


def start_processes(
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout_minutes: int = 30,
) -> torch.device:
    """Join the other ranks; where a process group exists already, only claim this rank's device.

    The rank and the size of the world are the arguments, or what torchrun put into the environment, or else
    this process is a world of its own.

    Args:
        init_method: Rendezvous as torch.distributed takes it, a `file://` address for instance.
        rank: This process's rank, together with `world_size`.
        world_size: Number of ranks, together with `rank`.
        timeout_minutes: How long a collective may wait for a rank.

    Returns:
        The device that this rank works on.

    Raises:
        ConfigError: The environment is incomplete, or there is no device for this rank.
    """
    global _owns_process_group, _rendezvous_folder
    prepare_host()
    if dist.is_initialized():
        return _claim_device(dist.get_world_size())
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank is {rank} and world_size is {world_size}: give both or neither")
    if rank is None or world_size is None:
        rank, world_size = _read_environment()
    if init_method is None and world_size > 1 and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"{world_size} ranks and no place for them to meet: MASTER_ADDR is not set\n"
            "  Start the ranks with torchrun, which sets MASTER_ADDR and MASTER_PORT, or give an init_method."
        )
    device = _claim_device(world_size)
    if init_method is None and world_size == 1:
        # A world of one needs no port: runs on one machine never meet.
        _rendezvous_folder = tempfile.TemporaryDirectory(prefix="torpor-rendezvous-")
        init_method = f"file://{Path(_rendezvous_folder.name) / 'store'}"
    dist.init_process_group(
        backend="gloo" if is_cpu_host() else "cpu:gloo,cuda:nccl",
        init_method=init_method or "env://",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(minutes=timeout_minutes),
    )
    _owns_process_group = True
    return device


def initialize(
    layout: Layout,
    seed: int,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout_minutes: int = 30,
) -> torch.device:
    """Join the other ranks, build Megatron's process groups and seed every generator.

    Args:
        layout: How the model is spread over the ranks.
        seed: Seed of all generators; ranks that must draw differently derive theirs from it.
        init_method: As for `start_processes`, which this calls.
        rank: As for `start_processes`.
        world_size: As for `start_processes`.
        timeout_minutes: As for `start_processes`.

    Returns:
        The device that this rank works on.

    Raises:
        ConfigError: The layout does not fit the world, or `start_processes` cannot go on. Every rank of a
            world raises the same.
    """
    joined_before = dist.is_initialized()
    device = start_processes(init_method, rank, world_size, timeout_minutes)
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.model_parallel_is_initialized():
        raise ConfigError("the process groups of a layout exist already: call parallel.shutdown() first")
    try:
        layout.data(dist.get_world_size())
    except ConfigError:
        if not joined_before:
            shutdown()
        raise
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        context_parallel_size=layout.context,
        distributed_timeout_minutes=timeout_minutes,
        # The default embedding ranks are the first and the last stage. MTP sits on the last stage as long as
        # no stage layout is given, so its embedding is among those that are kept equal.
        get_embedding_ranks=None,
        # Only the optimizer's old dp_zero checkpoint format gathers through these.
        create_gloo_process_groups=False,
    )
    # Stages draw differently, the ranks of one stage draw alike; tensor and expert parallel ranks draw from
    # the named states that Megatron keeps.
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    numpy.random.seed(stage_seed % 2**32)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)
    return device


def shutdown() -> None:
    """Take down Megatron's process groups, and the world if `start_processes` or `initialize` made it.

    A process group polls in threads of its own until the last reference to it is gone, and a model holds
    references in cycles: they are collected here, or the threads of one layout would slow down the next.
    """
    global _owns_process_group, _rendezvous_folder
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        # The first entry stands for the world.
        groups = [group for group in parallel_state._global_process_group_list if group is not None]
        parallel_state.destroy_model_parallel()
        while groups:
            dist.destroy_process_group(groups.pop())
    if _owns_process_group:
        dist.destroy_process_group()
        _owns_process_group = False
    gc.collect()
    if _rendezvous_folder is not None:
        _rendezvous_folder.cleanup()
        _rendezvous_folder = None


def global_rank() -> int:
    """Return this process's rank in the world, 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks in the world, 1 where there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first_stage() -> bool:
    """Say whether this rank holds the first pipeline stage."""
    from megatron.core import parallel_state

    return parallel_state.is_pipeline_first_stage(ignore_virtual=True)


def is_last_stage() -> bool:
    """Say whether this rank holds the last pipeline stage, where the loss is computed."""
    from megatron.core import parallel_state

    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def _read_environment() -> tuple[int, int]:
    """Return the rank and the size of the world that torchrun announced, or (0, 1) without torchrun."""
    names = ("RANK", "WORLD_SIZE")
    given = {name: os.environ[name] for name in names if name in os.environ}
    if not given:
        return 0, 1
    if missing := [name for name in names if name not in given]:
        raise ConfigError(
            f"the environment has {', '.join(given)} but not {', '.join(missing)}\n"
            "  torchrun sets both. Start the ranks with torchrun, or unset what is left over."
        )
    try:
        rank, size = int(given["RANK"]), int(given["WORLD_SIZE"])
    except ValueError:
        raise ConfigError(
            f"RANK is {given['RANK']!r} and WORLD_SIZE is {given['WORLD_SIZE']!r}: both have to be numbers"
        ) from None
    if not 0 <= rank < size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE is {size}: ranks count from 0 to {size - 1}")
    return rank, size


def _claim_device(size: int) -> torch.device:
    """Return this rank's own device, and make it the current one where there are several."""
    if is_cpu_host():
        return CPU
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if local_size > torch.cuda.device_count():
        raise ConfigError(
            f"{local_size} ranks on this machine, and {torch.cuda.device_count()} CUDA devices\n"
            "  Every rank needs a device of its own: start fewer ranks, or make more devices visible."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
