"""Clipping on a CUDA device."""

import pytest
import torch

from torpor.megatron.host import prepare_host


@pytest.mark.usefixtures("megatron_rank")
def test_the_norm_of_many_tensors_waits_for_none_and_scaling_needs_no_copy():
    prepare_host()
    from torpor.megatron.optimizer import _l2_norm, _scale

    tensors = [torch.full((n, 1000), 0.5, device="cuda") for n in range(1, 101)]
    flag = torch.zeros(1, dtype=torch.int, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm, _ = _l2_norm(2048, flag, [tensors], False)
        _scale(2048, flag, [tensors, tensors], 0.25)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.tolist() == pytest.approx([(5050 * 1000 * 0.25) ** 0.5])
    assert all(tensor.eq(0.125).all() for tensor in tensors)
    assert torch.cuda.max_memory_allocated() - before < tensors[-1].nbytes
