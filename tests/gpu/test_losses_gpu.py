"""The distillation loss on a CUDA device: the kernels' values and gradients, and what they save."""

import itertools

import pytest
import torch

from torpor.losses import LossSettings, OutputProjection, distillation_loss
from torpor.training import losses

S, B, H, V = 9, 3, 48, 10007
DIVERGENCES = ["forward_kl", "reverse_kl", "jensen_shannon"]
OPTIONS = [
    {},
    {"temperature": 2.5},
    {"cross_entropy_weight": 0.3},
    {"temperature": 0.7, "cross_entropy_weight": 0.5},
]


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(S, B, H), (V, H), (S, B, H // 2), (V, H // 2)]
    tensors = [torch.randn(shape, generator=generator) / shape[-1] ** 0.25 for shape in shapes]
    labels_BS = torch.randint(0, V, (B, S), generator=generator)
    labels_BS[0, 1] = -100
    mask_BS = torch.ones(B, S)
    mask_BS[1, 0], mask_BS[1, 2] = 0.0, 0.5
    return [t.to("cuda", dtype) for t in tensors], labels_BS.cuda(), mask_BS.cuda()


def loss_and_gradients(tensors, labels_BS, mask_BS, settings):
    states, weight, teacher_states, teacher_weight = tensors
    states, weight = (t.detach().requires_grad_() for t in (states, weight))
    result = distillation_loss(
        OutputProjection(states, weight),
        OutputProjection(teacher_states, teacher_weight),
        settings,
        labels_BS=labels_BS,
        loss_mask_BS=mask_BS,
        chunk_size=10,
    )
    return [result.loss.detach(), *torch.autograd.grad(result.loss, [states, weight])]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize(
    ("divergence", "options"), itertools.product(DIVERGENCES, OPTIONS), ids=lambda value: str(value)
)
def test_the_kernels_give_the_values_of_fp64(monkeypatch, divergence, options, dtype, tolerance):
    """FP64 on the same device takes PyTorch's way, which the CPU's tests compare with the definitions."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    kernels = losses._import_kernels()
    launches = []
    monkeypatch.setattr(
        kernels, "compare", lambda *a, f=kernels.compare, **k: (launches.append(k["is_sum"]), f(*a, **k))
    )
    settings = LossSettings(divergence=divergence, **options)
    tensors, *rest = inputs(dtype)
    got = loss_and_gradients(tensors, *rest, settings)
    assert launches, "PyTorch computed it"
    count = len(launches)
    wanted = loss_and_gradients([t.double() for t in tensors], *rest, settings)
    assert len(launches) == count, "the kernels computed FP64"
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


def test_a_call_holds_two_narrow_chunks_and_the_gradients():
    tokens, hidden, vocab, chunk = 2048, 256, 65536, 512
    tensors = [
        torch.randn(shape, device="cuda").bfloat16() for shape in [(tokens, 1, hidden), (vocab, hidden)]
    ]
    student = OutputProjection(*(t.requires_grad_() for t in tensors))
    teacher = OutputProjection(*(t.detach().clone() for t in tensors))
    distillation_loss(student, teacher, chunk_size=chunk)  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = distillation_loss(student, teacher, chunk_size=chunk)
    used = torch.cuda.max_memory_allocated() - before
    logits = 2 * chunk * vocab
    # The weight's gradient in FP32 beside both models' logits, or beside its rounding to BF16.
    assert used < 4 * vocab * hidden + max(2 * logits, 2 * vocab * hidden) + 2**24
    del result
