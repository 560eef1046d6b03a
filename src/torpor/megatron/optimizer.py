"""The optimizer: Megatron's own, over an AdamW that its distributed optimizer can save and resume.

To be imported after `torpor.megatron.host.prepare_host`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core import utils as megatron_utils
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, clip_grads, distrib_optimizer
from megatron.core.transformer.module import MegatronModule
from torch.optim.adamw import adamw

from torpor.errors import ConfigError


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW that keeps its step with the parameter group, as Transformer Engine's and Apex's FusedAdam do.

    Megatron's distributed optimizer (optimizer/distrib_optimizer.py) saves what belongs to a group apart from
    what belongs to a parameter. PyTorch's AdamW keeps a step with each parameter, where it is lost on the
    way; with the step in the group a resumed run equals an uninterrupted one bit for bit. The arithmetic is
    PyTorch's.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Decay of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decay of the weights, decoupled from the gradient.
        adam_w_mode: Has to be True; FusedAdam's name for decoupled weight decay.
        capturable: Has to be False; True is for CUDA graphs.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if not adam_w_mode:
            raise ConfigError(
                "decoupled_weight_decay is off: Torpor's AdamW has no other kind of weight decay"
            )
        if capturable:
            raise ConfigError("optimizer_cuda_graph is on: it needs Transformer Engine's Adam")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient, and count the step of every group that has parameters.

        Args:
            closure: Has to be None.
        """
        if closure is not None:
            raise ConfigError("GroupStepAdamW.step takes no closure: compute the gradients first")
        for group in self.param_groups:
            if not group["params"]:
                continue
            done = group.get("step", 0)
            group["step"] = done + 1
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                if not self.state[parameter]:
                    self.state[parameter] = {
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
            if not trained:
                continue
            device = trained[0].device
            adamw(
                trained,
                [parameter.grad for parameter in trained],
                [self.state[parameter]["exp_avg"] for parameter in trained],
                [self.state[parameter]["exp_avg_sq"] for parameter in trained],
                [],
                # One number a parameter, which the call counts up in place and which is dropped afterwards.
                list(torch.full((len(trained),), float(done), device=device).unbind()),
                # One pass over memory, and no temporary copy of everything.
                fused=True if device.type == "cuda" else None,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def build_optimizer(
    chunks: Sequence[MegatronModule],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    clip_grad: float,
    distributed: bool,
    dtype: torch.dtype,
) -> MegatronOptimizer:
    """Build Megatron's AdamW over the trainable parameters of a rank's chunks.

    Weights decay; biases, norms and everything else with one axis do not. With BF16 the optimizer works on
    FP32 copies. Parameters that do not require a gradient get neither state nor decay.

    Args:
        chunks: The rank's chunks, wrapped in Megatron's DistributedDataParallel.
        lr: Learning rate; a schedule may change it in the groups of the result.
        weight_decay: Decay of the weights.
        betas: Decay of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        clip_grad: Largest norm of the gradient of the whole model; 0 does not clip.
        distributed: Whether the data parallel ranks divide the state among them. The chunks' wrapper must
            have been built for that.
        dtype: torch.float32 or torch.bfloat16, that of the model.

    Returns:
        The optimizer.

    Raises:
        ConfigError: Another dtype, or a wrapper that was not built for `distributed`.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"dtype is {dtype}: training needs torch.float32 or torch.bfloat16")
    if chunks[0].ddp_config.use_distributed_optimizer != distributed:
        raise ConfigError(
            f"distributed is {distributed}, and the model's wrapper has use_distributed_optimizer="
            f"{chunks[0].ddp_config.use_distributed_optimizer}\n  Give both the same value."
        )
    _use_group_step_adam()
    _use_fused_clipping()
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        weight_decay=weight_decay,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_eps=eps,
        clip_grad=clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    optimizer = megatron_optimizer.get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # Megatron leaves this product to its learning-rate scheduler, and until that runs norms decay too.
        group["weight_decay"] = weight_decay * group["wd_mult"]
    return optimizer


def _use_group_step_adam() -> None:
    """Put GroupStepAdamW in the place where Megatron expects FusedAdam, unless it has found that.

    optimizer/__init__.py chooses the class to build, optimizer/distrib_optimizer.py chooses by its own flags
    where it looks for the step when it saves and loads. Both are choices made at import, so they are made
    anew here.
    """
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    megatron_optimizer.Adam = GroupStepAdamW
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = GroupStepAdamW
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True


def _use_fused_clipping() -> None:
    """Replace what Megatron clips gradients with where it has found neither Transformer Engine nor Apex.

    Its own fallback (core/utils.py) waits for the norm of every tensor, and scales in a copy of each.
    """
    if clip_grads.l2_norm_impl is megatron_utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm
    if clip_grads.multi_tensor_scale_impl is megatron_utils.local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = _scale


def _l2_norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Sequence[Sequence[torch.Tensor]], *_: Any
) -> tuple[torch.Tensor, None]:
    (tensors,) = tensor_lists
    return torch.nn.utils.get_total_norm(tensors).reshape(1), None


def _scale(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    scale: float,
) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        torch.mul(source, scale, out=target)
