"""Log-probabilities of given tokens, and entropies, from hidden states: logits exist one chunk at a time.

Shape suffixes: N tokens, C tokens of one chunk, H hidden, V this rank's part of the vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


def chunked_log_probs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    logit_scale: float = 1.0,
    chunk_size: int = 1024,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project hidden states onto the vocabulary and keep one log-probability and the entropy of each row.

    With z = logit_scale * hidden @ weight.T, multiplied in the dtype of the hidden states as an output layer
    does and in FP32 from there on (FP64 if they are FP64):

        log_probs = z[target] - logsumexp(z)         d log_probs / dz_j = [j = target] - p_j
        entropy   = logsumexp(z) - sum(p * z)        d entropy / dz_j   = -p_j * (log p_j + entropy)

    where p = softmax(z). Saved for backward are the arguments and two numbers a row; it computes each chunk's
    logits again.

    Args:
        hidden_NH: Hidden states of N tokens. Under tensor parallelism the same on every rank of the group,
            and the gradient returned for it is this rank's share, to be summed over the group: Megatron's
            `copy_to_tensor_model_parallel_region` does that, applied before this call.
        weight_VH: This rank's rows of the output weight; equally many on every rank, in the order of ranks.
        targets_N: Token ids in the whole vocabulary, int64, the same on every rank of the group.
        logit_scale: Factor of the logits, 1 / temperature for instance.
        chunk_size: Rows whose logits exist at the same time.
        group: Ranks that the vocabulary is divided over; None for one.

    Returns:
        Log-probabilities and entropies in nats, [N] each, FP32 (FP64), the same on every rank of the group.
        Only first derivatives are defined.
    """
    log_probs_N, entropy_N = _ChunkedLogProbs.apply(
        hidden_NH, weight_VH, targets_N, logit_scale, chunk_size, group
    )
    return log_probs_N, entropy_N


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_N: torch.Tensor,
        logit_scale: float,
        chunk_size: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Negative, or beyond the last row, for targets in another rank's part.
        local_N = targets_N if group is None else targets_N - dist.get_rank(group) * len(weight_VH)
        results = []
        for hidden_CH, local_C in zip(hidden_NH.split(chunk_size), local_N.split(chunk_size), strict=True):
            z_CV = _logits(hidden_CH, weight_VH, logit_scale)
            max_C = z_CV.amax(dim=-1)
            if group is not None:
                dist.all_reduce(max_C, op=dist.ReduceOp.MAX, group=group)
            z_CV.sub_(max_C[:, None])
            z_target_C = z_CV.gather(-1, _rows(local_C, z_CV)) * _is_local(local_C, z_CV)
            exp_CV = z_CV.exp()
            sum_exp_C = exp_CV.sum(dim=-1)
            sum_exp_z_C = exp_CV.mul_(z_CV).sum(dim=-1)
            sums_3C = torch.stack([z_target_C[:, 0], sum_exp_C, sum_exp_z_C])
            if group is not None:
                dist.all_reduce(sums_3C, group=group)
            z_target_C, sum_exp_C, sum_exp_z_C = sums_3C
            log_sum_C = sum_exp_C.log()
            log_probs_C = z_target_C - log_sum_C
            entropy_C = log_sum_C - sum_exp_z_C / sum_exp_C
            results.append((log_probs_C, entropy_C, log_sum_C + max_C))
        log_probs_N, entropy_N, log_sum_exp_N = (torch.cat(parts) for parts in zip(*results, strict=True))
        ctx.save_for_backward(hidden_NH, weight_VH, local_N, log_sum_exp_N, entropy_N)
        ctx.logit_scale, ctx.chunk_size = logit_scale, chunk_size
        ctx.set_materialize_grads(False)
        return log_probs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs_N: Any, grad_entropy_N: Any) -> Any:
        hidden_NH, weight_VH, local_N, log_sum_exp_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        # Chunks add up in FP32: in BF16 a long sum of small terms stands still.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=entropy_N.dtype) if needs_weight else None
        for start in range(0, len(hidden_NH), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            z_CV = _logits(hidden_NH[rows], weight_VH, ctx.logit_scale)
            log_p_CV = z_CV.sub_(log_sum_exp_N[rows, None])
            p_CV = log_p_CV.exp()
            grad_CV = torch.zeros_like(p_CV)
            if grad_entropy_N is not None:
                log_p_CV.add_(entropy_N[rows, None]).mul_(p_CV)
                grad_CV.addcmul_(log_p_CV, grad_entropy_N[rows, None], value=-1)
            if grad_log_probs_N is not None:
                grad_C1, local_C = grad_log_probs_N[rows, None], local_N[rows]
                grad_CV.addcmul_(p_CV, grad_C1, value=-1)
                grad_CV.scatter_add_(-1, _rows(local_C, z_CV), grad_C1 * _is_local(local_C, z_CV))
            grad_CV = grad_CV.mul_(ctx.logit_scale).to(hidden_NH.dtype)
            if needs_hidden:
                torch.mm(grad_CV, weight_VH, out=grad_hidden_NH[rows])
            if needs_weight:
                grad_weight_VH += grad_CV.t() @ hidden_NH[rows]
        if needs_weight:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight_VH, None, None, None, None


def _logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, scale: float) -> torch.Tensor:
    """Return this rank's logits [C, V] of a chunk, in a tensor that nobody else holds."""
    z_CV = hidden_CH @ weight_VH.t()
    return z_CV.to(torch.promote_types(z_CV.dtype, torch.float32)).mul_(scale)


def _is_local(local_C: torch.Tensor, z_CV: torch.Tensor) -> torch.Tensor:
    """Say [C, 1] which targets are in this rank's part of the vocabulary."""
    return ((local_C >= 0) & (local_C < z_CV.shape[-1]))[:, None]


def _rows(local_C: torch.Tensor, z_CV: torch.Tensor) -> torch.Tensor:
    """Return [C, 1] the place of each target among this rank's logits, some place for those elsewhere."""
    return local_C.clamp(0, z_CV.shape[-1] - 1)[:, None]
