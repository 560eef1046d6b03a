"""What every training run checks before it builds anything: the layout and the folders of its models."""

import hashlib
import os

import torch

from torpor.checkpoints.families import check_heads, find_family
from torpor.checkpoints.folder import Folder, open_folder
from torpor.errors import ConfigError, TorporError
from torpor.megatron.models import build_transformer_config
from torpor.megatron.parallel import Layout
from torpor.training.config import OptimizationConfig, RunConfig

# Norms, biases and routers are read whole. Of each larger tensor so much is, spread over all of it: merged
# adapters leave norms and biases alone, and reading all of a large model takes minutes.
_SAMPLED_BYTES = 2**16


def find_layout(config: OptimizationConfig) -> Layout:
    """Return the layout that a configuration asks for.

    Raises:
        ConfigError: the world, or the global batch, cannot be divided that way.
    """
    layout = Layout(
        tensor=config.tensor_parallel,
        pipeline=config.pipeline_parallel,
        expert=config.expert_parallel,
        context=config.context_parallel,
        sequence_parallel=config.sequence_parallel,
    )
    config.check_batch(layout.data(int(os.environ.get("WORLD_SIZE", "1"))))
    return layout


def model_dtype(config: OptimizationConfig) -> torch.dtype:
    """Return the dtype of a run's models."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype]


def open_model(role: str, config: RunConfig, layout: Layout) -> Folder:
    """Open a model's folder and check that it can be built as asked, without building it.

    Args:
        role: the setting that names the folder.
        config: which folder, and how the model is to be run.
        layout: see `find_layout`.

    Returns:
        The opened folder.

    Raises:
        ConfigError: the folder is missing, or the model does not divide, or reads shorter sequences.
        CheckpointError: the folder is damaged, or its heads are not all there.
        UnsupportedModelError: a model of a kind that is not known.
    """
    path = getattr(config, role)
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise ConfigError(f"`{role}`: {path} {what}\n  Give the path of a Hugging Face model folder.")
    folder = open_folder(path)
    # Before the whole map, whose complaint would not say that it is the heads that are missing.
    check_heads(folder)
    find_family(folder.config).name_map(folder.config).check(folder.tensors)
    try:
        build_transformer_config(
            folder.config,
            layout,
            model_dtype(config),
            recompute=config.recompute,
            transformer_impl=config.transformer_impl(role),
        )
    except TorporError as error:
        # It knows a configuration and not whose, and a run may have several models.
        raise type(error)(f"`{role}` {path}: {error}") from error
    longest = folder.config.get("max_position_embeddings")
    if longest is not None and config.sequence_length > longest:
        raise ConfigError(
            f"`sequence_length` is {config.sequence_length}, and the {role}'s config.json allows "
            f"max_position_embeddings {longest}\n  Use a sequence_length of at most {longest}."
        )
    return folder


def folder_digest(folder: Folder) -> str:
    """SHA-256 that tells two models apart: configuration, names, shapes, and bytes out of every tensor."""
    digest = hashlib.sha256(folder.config_bytes)
    for name, entry in sorted(folder.tensors.items()):
        digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
        digest.update(folder.read_sample(name, _SAMPLED_BYTES))
    return digest.hexdigest()
