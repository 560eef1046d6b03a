"""Forward and training steps over whatever layout a test has set up, through Megatron's own schedules."""

import torch


def logits_of(chunks, tokens: torch.Tensor) -> torch.Tensor | None:
    """Run tokens [B, S] through all stages; return whole logits [B, S, V] on the last, None elsewhere."""
    from megatron.core import tensor_parallel

    for chunk in chunks:
        chunk.eval()

    def gather(output, non_loss_data):
        return tensor_parallel.gather_from_tensor_model_parallel_region(output)

    with torch.no_grad():
        collected = _run_schedule(chunks, tokens, gather, labels=None, forward_only=True)
    return collected[0] if collected else None


def wrap_and_build_optimizer(chunks, *, distributed: bool, bucket_size: int | None = None):
    """Wrap chunks in DDP, with overlapped buckets if a size is given, and build the optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from torpor.megatron.optimizer import build_optimizer

    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=bucket_size is not None,
        bucket_size=bucket_size,
    )
    wrapped = [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
    optimizer = build_optimizer(
        wrapped,
        lr=1e-2,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        clip_grad=1.0,
        distributed=distributed,
        dtype=chunks[0].config.params_dtype,
    )
    return wrapped, optimizer


def train_step(wrapped, optimizer, tokens: torch.Tensor) -> float | None:
    """Do one optimizer step on next-token prediction; return the loss on the last stage, None elsewhere."""
    for chunk in wrapped:
        chunk.train()
        chunk.zero_grad_buffer()
    optimizer.zero_grad()

    def mean(output):
        loss = output.float().mean()
        return loss, {"loss": loss.detach()}

    reports = _run_schedule(wrapped, tokens, mean, labels=tokens.roll(-1, 1), forward_only=False)
    is_updated, _, _ = optimizer.step()
    assert is_updated
    return reports[0]["loss"].item() if reports else None


def _run_schedule(chunks, tokens, finish, *, labels, forward_only):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    positions = torch.arange(tokens.shape[1]).expand_as(tokens)

    def step(_, model):
        return model(tokens, positions, None, labels=labels), finish

    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=None,
        model=list(chunks),
        num_microbatches=1,
        seq_length=tokens.shape[1],
        micro_batch_size=tokens.shape[0],
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
