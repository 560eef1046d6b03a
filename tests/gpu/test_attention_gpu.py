"""Attention on a CUDA device: kernels that never hold the scores of all pairs, and the CPU's values."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, GROUPS, HEAD = 8, 2, 64
FLASH, EFFICIENT = [SDPBackend.FLASH_ATTENTION], [SDPBackend.EFFICIENT_ATTENTION]


def build(dtype):
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from torpor.megatron.attention import TorchDotProductAttention

    sizes = {"hidden_size": HEADS * HEAD, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
    config = TransformerConfig(num_layers=1, attention_dropout=0.0, params_dtype=dtype, **sizes)
    return TorchDotProductAttention(config, 1, AttnMaskType.causal, "self")


def make_inputs(queries, keys, dtype):
    g = torch.Generator().manual_seed(0)
    shapes = [(queries, 1, HEADS, HEAD), (keys, 1, GROUPS, HEAD), (keys, 1, GROUPS, HEAD)]
    return [torch.randn(s, generator=g).to("cuda", dtype).requires_grad_() for s in shapes]


def run(module, inputs, mask, packed):
    """Return the output and the gradients."""
    if packed:
        inputs = [t.squeeze(1) for t in inputs]
    output = module(*inputs, mask, packed_seq_params=packed)
    weight = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
    return [output, *torch.autograd.grad((output.double() * weight).sum(), inputs)]


@pytest.mark.parametrize(
    ("kind", "dtype", "kernels"),
    [
        ("causal", torch.bfloat16, FLASH),
        ("last queries", torch.bfloat16, FLASH),
        ("packed", torch.bfloat16, FLASH),
        ("mask", torch.bfloat16, EFFICIENT),
        ("causal", torch.float32, EFFICIENT),
        ("last queries", torch.float32, EFFICIENT),
    ],
)
def test_fused_kernels_serve_groups_and_give_the_values_of_fp64(megatron_rank, kind, dtype, kernels):
    """With every other kernel forbidden."""
    from megatron.core.packed_seq_params import PackedSeqParams

    inputs = make_inputs(256 if kind == "last queries" else 1024, 1024, dtype)
    mask = packed = None
    if kind == "mask":
        mask = torch.ones(1, 1, 1024, 1024, device="cuda").triu(1).bool()
    if kind == "packed":
        ends = torch.tensor([0, 300, 301, 1024], dtype=torch.int32, device="cuda")
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    with sdpa_kernel(kernels):
        got = run(build(dtype), inputs, mask, packed)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = run(build(torch.float64), wide, mask, packed)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1)


def test_no_buffer_has_the_size_of_all_pairs(megatron_rank):
    """16384 positions: their scores would take 4 GiB in BF16."""
    inputs = make_inputs(16384, 16384, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(build(torch.bfloat16), inputs, None, None)
    assert torch.cuda.max_memory_allocated() - before < 2**30
