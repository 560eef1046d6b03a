"""Forwards over training windows, for quantisers to see what passes through them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torpor.megatron.host import current_device
from torpor.training.config import OptimizationConfig
from torpor.training.data import Batch, BatchPlan, PackedWindows, training_batches


def run_forwards(
    chunks: Sequence[torch.nn.Module],
    settings: OptimizationConfig,
    windows: PackedWindows,
    num_windows: int,
) -> None:
    """Run a model over the first training windows, through all pipeline stages, without gradients.

    Args:
        chunks: this rank's bare chunks; left in training mode.
        settings: batch sizes.
        windows: the data.
        num_windows: how many over all ranks, rounded up to whole global batches.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    plan = BatchPlan.of_this_rank(settings)
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        for step in range(math.ceil(num_windows / settings.global_batch_size)):
            get_forward_backward_func()(
                forward_step_func=_forward,
                data_iterator=training_batches(windows, plan, step, current_device()),
                model=list(chunks),
                num_microbatches=plan.num_micro_batches,
                seq_length=settings.sequence_length,
                micro_batch_size=settings.micro_batch_size,
                forward_only=True,
                collect_non_loss_data=True,
            )
    for chunk in chunks:
        chunk.train()


def _forward(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    output = model(input_ids=batch.tokens_BS, position_ids=batch.positions_BS, attention_mask=None)
    return output, lambda logits, non_loss_data: None
