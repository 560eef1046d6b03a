"""Supervised fine-tuning: from a configuration to a verified Hugging Face folder of the tuned model."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torpor.checkpoints.families import find_family
from torpor.megatron.lora_targets import find_lora_targets, is_target
from torpor.megatron.models import build_model
from torpor.megatron.weights import export_folder, load_weights
from torpor.runs.inputs import find_layout, model_dtype, open_model
from torpor.runs.result import RunResult
from torpor.runs.training_run import Recipe, run_training, say_tokens
from torpor.training.config import LoraSettings, SftConfig
from torpor.training.data import Windows, check_vocabulary, load_tokenizer
from torpor.training.samples import SampleRows, check_first_record, prepare_rows
from torpor.training.sources import find_sources

if TYPE_CHECKING:
    import torch

    from torpor.checkpoints.folder import Folder
    from torpor.dormancy import DormantMTP
    from torpor.megatron.parallel import Layout
    from torpor.training.loop import Job


def sft(config: SftConfig) -> RunResult:
    """Run a fine-tuning, or the rest of one that was interrupted. Every rank calls it.

    Args:
        config: what to do.

    Returns:
        How it ended, the same on every rank.

    Raises:
        ConfigError: the configuration, the data or the tokenizer cannot be used.
        TorporError: see `run_training`.
    """
    return run_training(config, lambda: _check_inputs(config))


def _check_inputs(config: SftConfig) -> Recipe:
    """Check whatever can be checked without building a model; nothing is written."""
    layout = find_layout(config)
    model = open_model("model", config, layout)
    targets = _find_targets(config, model)
    sources = find_sources(config.data)
    tokenizer = load_tokenizer(model.path)
    check_vocabulary(tokenizer, model.config["vocab_size"])
    check_first_record(sources, tokenizer)

    def prepare_data(folder: Path) -> SampleRows:
        return prepare_rows(
            sources,
            tokenizer,
            vocab_size=model.config["vocab_size"],
            folder=folder,
            settings=config,
            on_progress=say_tokens(),
        )

    def export(checkpoint: Path, out: Path) -> None:
        export_folder(
            checkpoint,
            model,
            out,
            mtp="source" if config.freeze_mtp else "live",
            is_trained=functools.partial(is_target, targets=targets) if targets else None,
        )

    return Recipe(
        models={"model": model},
        layout=layout,
        prepare_data=prepare_data,
        build=lambda windows, steps: _build(config, model, layout, targets, windows, steps),
        export=export,
        merge=_merge if targets else None,
        notes=_describe_lora(config.lora, targets) if config.lora else [],
    )


def _describe_lora(lora: LoraSettings, targets: list[str]) -> list[str]:
    return [
        f"adapters of rank {lora.r} on {', '.join(targets)}; MTP layers, routed experts, embedding and output"
        " layer get none"
    ]


def _find_targets(config: SftConfig, model: "Folder") -> list[str]:
    if config.lora is None:
        return []
    name_map = find_family(model.config).name_map(model.config)
    return find_lora_targets(name_map, config.lora.target_modules)


def _build(
    config: SftConfig, model: "Folder", layout: "Layout", targets: list[str], windows: Windows, steps: int
) -> "tuple[Job, dict[str, DormantMTP]]":
    from torpor.dormancy import freeze_mtp
    from torpor.megatron.padding import leave_padding_uncounted
    from torpor.training.loop import prepare_job
    from torpor.training.sft import sft_objective

    chunks = build_model(
        model.config,
        layout,
        model_dtype(config),
        recompute=config.recompute,
        per_token_loss=True,
        transformer_impl=config.transformer_impl("model"),
    )
    load_weights(chunks, model)
    leave_padding_uncounted(chunks)
    asleep = {"model": freeze_mtp(chunks)} if config.freeze_mtp and chunks[0].config.mtp_num_layers else {}
    if config.lora:
        from torpor.megatron.lora import add_lora

        add_lora(
            chunks,
            targets,
            r=config.lora.r,
            alpha=config.lora.lora_alpha,
            dropout=config.lora.lora_dropout,
            seed=config.seed,
        )
    return prepare_job(chunks, config, windows, sft_objective(), steps=steps), asleep


def _merge(chunks: "Sequence[torch.nn.Module]") -> None:
    from torpor.megatron.lora import merge_lora

    merge_lora(chunks)
