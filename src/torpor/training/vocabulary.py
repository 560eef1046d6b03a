"""Distributions over a vocabulary, a chunk of tokens at a time and over ranks that each hold a part of it.

What `losses` and log-probabilities are built from. Nothing here knows autograd: callers compute gradients
themselves, inside a `torch.autograd.Function`. Shapes: N tokens in the order of a flattened [s, b], V this
rank's share of the vocabulary, H hidden.

Sources: the vocabulary-parallel cross-entropy of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053,
section 3) for the division over ranks; log-sum-exp of parts, log(sum_i exp(x_i)) =
logsumexp_r(logsumexp_{i in r}(x_i)).
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from torpor.megatron.hidden_states import OutputProjection

# One buffer of a chunk's logits; a divergence holds about four of them in FP32, or two in BF16. Large enough
# for matrix products that keep an accelerator busy: 512 tokens of a vocabulary of 131072 in FP32.
_CHUNK_BYTES = 2**28


def chunk_size(projection: OutputProjection, dtype: torch.dtype = torch.float32) -> int:
    """Return how many tokens to compute at once, the same on every rank that shares the vocabulary.

    Args:
        projection: What makes the logits.
        dtype: The type of buffers of their size.
    """
    return max(1, _CHUNK_BYTES // (dtype.itemsize * projection.weight_VH.shape[0]))


def chunks(num_tokens: int, size: int) -> Iterator[slice]:
    """Yield slices that cover `num_tokens` in order, of `size` tokens each but for the last."""
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def gather_tokens(projection: OutputProjection) -> torch.Tensor:
    """Return the hidden states of all tokens [N, h], gathered from the ranks that divide the sequence.

    Token s * b + j is number s of sequence j.
    """
    states_SBH = projection.hidden_states_SBH.detach()
    if projection.is_sequence_parallel and _size(projection.tp_group) > 1:
        gathered = states_SBH.new_empty(
            _size(projection.tp_group) * states_SBH.shape[0], *states_SBH.shape[1:]
        )
        dist.all_gather_into_tensor(gathered, states_SBH.contiguous(), group=projection.tp_group)
        states_SBH = gathered
    return states_SBH.flatten(0, -2)


def reduce_token_gradients(grad_NH: torch.Tensor, projection: OutputProjection) -> torch.Tensor:
    """Sum the ranks' shares of the hidden states' gradient, and give each rank its part of the sequence.

    Args:
        grad_NH: Gradient by this rank's part of the vocabulary, of all tokens; may be overwritten.
        projection: What `gather_tokens` was given.

    Returns:
        Gradient of `projection.hidden_states_SBH`, in its shape.
    """
    shape = projection.hidden_states_SBH.shape
    if _size(projection.tp_group) == 1:
        return grad_NH.view(shape)
    if projection.is_sequence_parallel:
        share = grad_NH.new_empty(shape)
        dist.reduce_scatter_tensor(share.flatten(0, -2), grad_NH, group=projection.tp_group)
        return share
    dist.all_reduce(grad_NH, group=projection.tp_group)
    return grad_NH.view(shape)


def local_rows(projection: OutputProjection) -> tuple[torch.Tensor, int]:
    """Return this rank's rows that stand for tokens [v, h], without padding, and the first one's token id."""
    weight_VH = projection.weight_VH.detach()
    start = dist.get_rank(projection.tp_group) * weight_VH.shape[0] if _size(projection.tp_group) > 1 else 0
    if projection.vocab_size is not None:
        weight_VH = weight_VH[: max(0, projection.vocab_size - start)]
    return weight_VH, start


def outside(ids: torch.Tensor, projection: OutputProjection) -> torch.Tensor:
    """Say which ids are no tokens of the whole vocabulary."""
    size = projection.vocab_size or _size(projection.tp_group) * projection.weight_VH.shape[0]
    return (ids < 0) | (ids >= size)


def log_softmax(
    logits_NV: torch.Tensor, group: dist.ProcessGroup | None, temperature: float = 1.0
) -> torch.Tensor:
    """Return log softmax(logits / temperature) over the vocabulary of all ranks.

    Args:
        logits_NV: This rank's logits, of any floating type.
        group: Ranks that the vocabulary is divided over, or None.
        temperature: Divides the logits.

    Returns:
        This rank's part [n, v], FP32 (FP64 for FP64 logits), in memory of its own.
    """
    dtype = accumulation_dtype(logits_NV.dtype)
    if temperature != 1.0:
        logits_NV = logits_NV.to(dtype) / temperature
    log_probs_NV = torch.log_softmax(logits_NV, dim=-1, dtype=dtype)
    if _size(group) == 1:
        return log_probs_NV
    if logits_NV.shape[-1]:
        # At the largest logit its log-probability is small: nothing is lost by the subtraction.
        largest_N, index_N = logits_NV.max(dim=-1)
        local_N = largest_N.to(dtype) - log_probs_NV.gather(-1, index_N[:, None])[:, 0]
    else:  # this rank holds nothing but padding
        local_N = log_probs_NV.new_full(logits_NV.shape[:1], -torch.inf)
    return log_probs_NV.add_((local_N - log_sum_exp_over(local_N, group))[:, None])


def log_sum_exp_over(values_N: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return log(sum(exp(values))) over the ranks of a group [n]; None is this rank alone."""
    if _size(group) == 1:
        return values_N
    parts = values_N.new_empty(_size(group) * values_N.numel())
    dist.all_gather_into_tensor(parts, values_N, group=group)
    return parts.view(_size(group), -1).logsumexp(0)


def pick(
    values_NV: torch.Tensor, ids: torch.Tensor, start: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the values at whole-vocabulary ids, wherever they lie.

    Args:
        values_NV: This rank's part.
        ids: Token ids [n] or [n, k], the same on every rank; an id outside the vocabulary gives 0.
        start: Id of this rank's first value.
        group: Ranks that the vocabulary is divided over, or None.

    Returns:
        Values in the shape of `ids`, the same on every rank.
    """
    columns, is_here = local_columns(ids, start, values_NV.shape[-1])
    if values_NV.shape[-1]:
        picked = values_NV.gather(-1, columns.view(len(columns), -1)).view(ids.shape)
        picked = picked.masked_fill_(~is_here, 0.0)
    else:
        picked = values_NV.new_zeros(ids.shape)
    return sum_over(picked, group)


def local_columns(ids: torch.Tensor, start: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids as columns of this rank's part, 0 where they lie elsewhere, and where they lie here."""
    is_here = (ids >= start) & (ids < start + width)
    return torch.where(is_here, ids - start, 0), is_here


def top_k(
    logits_NV: torch.Tensor, k: int, start: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest logits of the whole vocabulary and their ids, [n, k] each, alike on every rank."""
    values, columns = logits_NV.topk(min(k, logits_NV.shape[-1]), dim=-1)
    ids = columns + start
    size = _size(group)
    if size == 1:
        return values, ids
    # Every rank gives as many, whatever its share of padding.
    missing = k - values.shape[-1]
    values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, missing))
    all_values = _gather_columns(values, group)
    best, order = all_values.topk(k, dim=-1)
    return best, _gather_columns(ids, group).gather(-1, order)


def _gather_columns(values_NK: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    size = _size(group)
    gathered = values_NK.new_empty(size * values_NK.shape[0], values_NK.shape[1])
    dist.all_gather_into_tensor(gathered, values_NK.contiguous(), group=group)
    return gathered.view(size, *values_NK.shape).transpose(0, 1).flatten(1)


def sum_over(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum in place over the ranks of a group; None is this rank alone."""
    if _size(group) > 1:
        dist.all_reduce(values, group=group)
    return values


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that sums are kept in: FP32, or FP64 for FP64."""
    return torch.promote_types(dtype, torch.float32)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)
