"""For training scripts that distil with Model-Optimizer's Megatron plugin and let the MTP layers sleep."""

from pathlib import Path
from typing import TYPE_CHECKING

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
