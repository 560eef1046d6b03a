"""The learning rate over the steps: a linear warm-up, then a cosine, a straight line or a constant."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from torpor.training.config import OptimizationConfig


def build_schedule(optimizer: Any, settings: "OptimizationConfig", steps: int) -> "OptimizerParamScheduler":
    """Build Megatron's scheduler, standing before the first step.

    The loop advances it *before* the optimizer steps: step k (from 1) of N trains at the rate of k, so that
    the first step of a warm-up is not lost to a rate of zero and the last step reaches `min_lr`. The rate is
    a function of the step alone: a resumed run calls `step(steps made)` and nothing is stored.

    Args:
        optimizer: a MegatronOptimizer.
        settings: lr, min_lr, warmup_steps, schedule and weight_decay.
        steps: N.

    Returns:
        The scheduler.

    Raises:
        ConfigError: the warm-up leaves no step.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from torpor.errors import ConfigError

    if settings.warmup_steps >= steps:
        raise ConfigError(
            f"`warmup_steps` {settings.warmup_steps} leaves no step of the run's {steps}\n"
            "  Lower warmup_steps, or train longer."
        )
    for group in optimizer.param_groups:
        # A group's own values go before the scheduler's, and an OptimizerConfig leaves min_lr there as None.
        group["max_lr"], group["min_lr"] = settings.lr, settings.min_lr
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=steps,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
