"""For training scripts that distil or quantise with Model-Optimizer and let the MTP layers sleep."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torpor.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from modelopt.torch.distill.plugins.megatron import DistillationConfig


def setup_distillation_config(
    config_or_path: "str | Path | DistillationConfig | None",
    student_cfg: "TransformerConfig",
    teacher_cfg: "TransformerConfig",
) -> "DistillationConfig":
    """Make the distillation's configuration as Model-Optimizer does, once no pair in it names an MTP module.

    In place of `modelopt.torch.distill.plugins.megatron.setup_distillation_config`, with the same arguments,
    for models whose MTP layers are put to sleep. Every rank sees the same pairs and raises alike, where
    Model-Optimizer's own resolves them on the last pipeline stage only.

    Args:
        config_or_path: The configuration, the path of a YAML file with one, or None for Model-Optimizer's
            default.
        student_cfg: The student's configuration.
        teacher_cfg: The teacher's.

    Returns:
        The configuration, complete: with criterion and loss balancer.

    Raises:
        ConfigError: if a pair names an MTP module, on either side; the message has the pair and the trunk
            layer to name instead.

    Source:
        modelopt/torch/distill/plugins/megatron.py, `setup_distillation_config`.
    """
    import yaml  # type: ignore[import-untyped]
    from modelopt.torch.distill.plugins import megatron

    from torpor.dormancy.distillation_pairs import describe_mtp_pair, named_pairs

    if isinstance(config_or_path, str | Path):
        values = yaml.safe_load(Path(config_or_path).read_text(encoding="utf-8"))
        config_or_path = megatron.DistillationConfig(**values)
    if config_or_path is not None:
        num_layers = (student_cfg.num_layers, teacher_cfg.num_layers)
        problem = describe_mtp_pair(named_pairs(config_or_path), num_layers)
        if problem is not None:
            raise ConfigError(problem)
    return megatron.setup_distillation_config(config_or_path, student_cfg, teacher_cfg)


def should_freeze_mtp(model: torch.nn.Module | Sequence[torch.nn.Module]) -> bool:
    """Say whether the MTP layers of a model that is trained to recover from quantisation should sleep.

    Layers that were left out of quantisation have lost nothing: they should sleep, as in a model that is not
    quantised at all. Quantised ones should stay awake, for training to recover their quantisation error too.
    Every rank calls it once Model-Optimizer has quantised the model, before `freeze_mtp`, and gets the same
    answer.

    Args:
        model: The model or the list of its chunks; the teacher of a DistillationModel is not looked at.

    Returns:
        Whether no enabled quantiser is in an MTP layer, on any rank.
    """
    from modelopt.torch.quantization.nn import TensorQuantizer

    chunks = [model] if isinstance(model, torch.nn.Module) else model
    is_quantized = any(
        isinstance(module, TensorQuantizer) and module.is_enabled
        for chunk in chunks
        for name, module in chunk.named_modules()
        if "mtp" in name.split(".") and "_teacher_model" not in name.split(".")
    )
    everyone = [is_quantized]
    if torch.distributed.is_initialized():
        everyone *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, is_quantized)
    return not any(everyone)
