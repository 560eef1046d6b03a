"""Supervised fine-tuning: next-token cross-entropy over response tokens."""

from collections.abc import Iterator
from typing import Any

import torch

from torpor.megatron.hidden_states import OutputProjection, hand_over_projection
from torpor.training.log_probs import log_probs_and_entropy
from torpor.training.loop import LossFunction, Metrics, Objective
from torpor.training.samples import SampleBatch


def sft_objective() -> Objective:
    """Cross-entropy summed over the response tokens of a step, to be divided by their number.

    For models built with `per_token_loss`: every response token of a global batch counts the same, in
    whichever micro-batch and on whichever rank it is. Logits exist one chunk of tokens at a time. Where MTP
    layers are awake, Megatron adds their loss, over the same tokens, to the gradients.
    """
    from torpor.megatron.padding import router_padding_mask

    def forward_step(
        batches: Iterator[SampleBatch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, LossFunction]:
        batch = next(batches)
        with hand_over_projection(model) as handover:
            output = model(
                input_ids=batch.tokens_BS,
                position_ids=batch.positions_BS,
                attention_mask=None,
                labels=batch.labels_BS,
                loss_mask=batch.loss_mask_BS,
                packed_seq_params=_packed_seq_params(batch.cu_seqlens),
                padding_mask=router_padding_mask(model, batch.padding_mask_BS),
            )

        def loss(_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
            projection = handover.take()
            assert projection is not None, "the schedule asks the last stage alone"
            return _sum_over_responses(projection, batch)

        return output, loss

    return Objective(forward_step)


def _sum_over_responses(
    projection: OutputProjection, batch: SampleBatch
) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    log_probs_N, _ = log_probs_and_entropy(projection, batch.labels_BS.t().flatten())
    loss_mask_N = batch.loss_mask_BS.t().flatten()
    total = -(log_probs_N * loss_mask_N).sum()
    count = loss_mask_N.sum()
    return total, count.to(torch.int32), {"loss": torch.stack([total.detach(), count.to(total.dtype)])}


def _packed_seq_params(cu_seqlens: torch.Tensor | None) -> Any:
    """What Megatron is told about a packed row; None for rows of one sample."""
    if cu_seqlens is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=int(cu_seqlens[-1]),
    )
