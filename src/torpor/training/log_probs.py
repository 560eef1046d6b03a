"""Log-probabilities of given tokens, and entropies, from hidden states: logits exist one chunk at a time.

Shapes as in `vocabulary`: N tokens in the order of a flattened [s, b], V this rank's share of the vocabulary,
H hidden, C tokens of one chunk.
"""

from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from torpor.megatron.hidden_states import OutputProjection
from torpor.training import vocabulary


def log_probs_and_entropy(
    projection: OutputProjection, targets_N: torch.Tensor, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project hidden states onto the vocabulary and keep one log-probability and the entropy of each token.

    With z = hidden @ weight.T / temperature, multiplied in the type of the hidden states as the output layer
    does, in FP32 from there on (FP64 if they are FP64), and p = softmax(z):

        log_probs = log p[target]            d log_probs / dz_j = [j = target] - p_j
        entropy   = -sum_j p_j log p_j       d entropy / dz_j   = -p_j * (log p_j + entropy)

    Saved for backward are the hidden states of this rank, the weight and two numbers a token; it computes
    each chunk's logits again.

    Args:
        projection: Hidden states and output weight; both get gradients, summed over the ranks as Megatron's
            own output layer sums them.
        targets_N: Token ids in the whole vocabulary, int64, of all N = s * b tokens, the same on every rank
            that the vocabulary is divided over.
        temperature: Divides the logits.

    Returns:
        Log-probabilities and entropies in nats, [N] each, FP32 (FP64), the same on every such rank. Ids
        outside the vocabulary have the log-probability NaN: an error would have to read them back.
        Only first derivatives are defined.
    """
    log_probs_N, entropy_N = _LogProbsAndEntropy.apply(
        projection.hidden_states_SBH, projection.weight_VH, projection, targets_N, temperature
    )
    return log_probs_N, entropy_N


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SBH: torch.Tensor,
        weight_VH: torch.Tensor,
        projection: OutputProjection,
        targets_N: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = projection.tp_group
        hidden_NH = vocabulary.gather_tokens(projection)
        rows_VH, start = vocabulary.local_rows(projection)
        log_probs, entropies = [], []
        for chunk in vocabulary.chunks(len(hidden_NH), vocabulary.chunk_size(projection)):
            log_p_CV = vocabulary.log_softmax(hidden_NH[chunk] @ rows_VH.t(), group, temperature)
            log_probs.append(vocabulary.pick(log_p_CV, targets_N[chunk], start, group))
            entropies.append(vocabulary.sum_over(-log_p_CV.mul_(log_p_CV.exp()).sum(-1), group))
        entropy_N = torch.cat(entropies)
        ctx.save_for_backward(hidden_SBH, weight_VH, targets_N, entropy_N)
        # Without the tensors: those are saved where autograd watches over them.
        ctx.projection_of = partial(
            OutputProjection,
            tp_group=group,
            is_sequence_parallel=projection.is_sequence_parallel,
            vocab_size=projection.vocab_size,
        )
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        log_probs_N = torch.cat(log_probs).masked_fill_(vocabulary.outside(targets_N, projection), torch.nan)
        return log_probs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_SBH, weight_VH, targets_N, entropy_N = ctx.saved_tensors
        projection = ctx.projection_of(hidden_SBH, weight_VH)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_NH = vocabulary.gather_tokens(projection)
        rows_VH, start = vocabulary.local_rows(projection)
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        # Chunks add up in FP32: in BF16 a long sum of small terms stands still.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=entropy_N.dtype) if needs_weight else None
        for chunk in vocabulary.chunks(len(hidden_NH), vocabulary.chunk_size(projection)):
            logits_CV = hidden_NH[chunk] @ rows_VH.t()
            log_p_CV = vocabulary.log_softmax(logits_CV, projection.tp_group, ctx.temperature)
            p_CV = log_p_CV.exp()
            # First the factor of -p, then the whole.
            if grad_entropy_N is None:
                grad_CV = log_p_CV.zero_()
            else:
                grad_CV = log_p_CV.add_(entropy_N[chunk, None]).mul_(grad_entropy_N[chunk, None])
            if grad_log_probs_N is not None:
                grad_CV.add_(grad_log_probs_N[chunk, None])
            grad_CV.mul_(p_CV).neg_()
            if grad_log_probs_N is not None and len(rows_VH):
                columns_C, is_here_C = vocabulary.local_columns(targets_N[chunk], start, len(rows_VH))
                at_target_C = grad_log_probs_N[chunk].masked_fill(~is_here_C, 0.0)
                grad_CV.scatter_add_(-1, columns_C[:, None], at_target_C[:, None])
            grad_CV = grad_CV.div_(ctx.temperature).to(hidden_NH.dtype)
            if grad_hidden_NH is not None:
                torch.mm(grad_CV, rows_VH, out=grad_hidden_NH[chunk])
            if grad_weight_VH is not None:
                grad_weight_VH[: len(rows_VH)] += grad_CV.t() @ hidden_NH[chunk]
        return (
            None if grad_hidden_NH is None else vocabulary.reduce_token_gradients(grad_hidden_NH, projection),
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None,
            None,
            None,
        )
