"""Distillation losses from hidden states: ours beside Liger Kernel's and the plain computation.

Each arm computes the loss and its gradient by the student's hidden states and output weight, in BF16, in
several rounds of one process. Prints a table of medians and one line of JSON: the time, its ratio to the
plain computation, and the memory that a call needs beyond its arguments.

Liger Kernel is optional (`pip install liger-kernel`; written for 0.8.5) and needs CUDA. Both of its
losses are measured: the Triton kernel behind a chunked projection (`LigerFusedLinearJSD`) and the compiled
chunks of PyTorch (`LigerFusedLinearJSDLoss`). For both, beta 0 is the forward KL and beta 1 the reverse KL.

    python benchmarks/losses.py                               # one GPU: 4096 tokens, vocabulary 131072
    python benchmarks/losses.py --divergence jensen_shannon
    python benchmarks/losses.py --tiny                        # anywhere, to try the script
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch

from torpor.losses import LossSettings, OutputProjection, distillation_loss
from torpor.training import losses

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
BETAS = {"forward_kl": 0.0, "jensen_shannon": 0.5, "reverse_kl": 1.0}
TINY = {"tokens": 64, "hidden": 16, "teacher_hidden": 24, "vocab": 320, "rounds": 1, "repeats": 2}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--teacher-hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--divergence", choices=BETAS, default="forward_kl")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--chunk-size", type=int, help="tokens at once for ours, its own choice if not given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10, help="timed calls a round, after 3 untimed")
    parser.add_argument("--tiny", action="store_true", help="sizes that any machine can do")
    arguments = parser.parse_args()
    if arguments.tiny:
        vars(arguments).update(TINY)
    return arguments


def plain_loss(arguments: argparse.Namespace) -> Loss:
    """The definition over all logits at once, in FP32."""

    def compute(student_NH, student_weight_VH, teacher_NH, teacher_weight_VH):
        z = (student_NH @ student_weight_VH.t()).float() / arguments.temperature
        with torch.no_grad():
            t = (teacher_NH @ teacher_weight_VH.t()).float() / arguments.temperature
            log_p = t.log_softmax(-1)
        log_q = z.log_softmax(-1)
        if arguments.divergence == "forward_kl":
            losses_N = (log_p.exp() * (log_p - log_q)).sum(-1)
        elif arguments.divergence == "reverse_kl":
            losses_N = (log_q.exp() * (log_q - log_p)).sum(-1)
        else:
            log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0, device=z.device))
            losses_N = 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1)
        return losses_N.mean() * arguments.temperature**2

    return compute


def our_loss(arguments: argparse.Namespace, *, has_kernels: bool) -> Loss:
    settings = LossSettings(divergence=arguments.divergence, temperature=arguments.temperature)
    without_kernels = mock.patch.object(losses, "_import_kernels", return_value=None)

    def compute(student_NH, student_weight_VH, teacher_NH, teacher_weight_VH):
        with contextlib.nullcontext() if has_kernels else without_kernels:
            return distillation_loss(
                OutputProjection(student_NH[:, None], student_weight_VH),
                OutputProjection(teacher_NH[:, None], teacher_weight_VH),
                settings,
                chunk_size=arguments.chunk_size,
            ).loss

    return compute


def liger_losses(arguments: argparse.Namespace) -> dict[str, Loss]:
    if not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDLoss
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    beta, temperature = BETAS[arguments.divergence], arguments.temperature
    labels_N = torch.zeros(arguments.tokens, dtype=torch.long, device="cuda")  # none is ignored
    triton, narrow = (
        LigerFusedLinearJSD(jsd_beta=beta, temperature=temperature, accum_dtype=dtype)
        for dtype in (torch.float32, None)
    )
    chunked = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, temperature=temperature
    )
    return {
        "Liger, Triton": lambda *inputs: triton(*inputs, labels_N) * temperature**2,
        "Liger, Triton, BF16 sums": lambda *inputs: narrow(*inputs, labels_N) * temperature**2,
        "Liger, compiled chunks": lambda *inputs: chunked(*inputs, labels_N) * temperature**2,
    }


def make_inputs(arguments: argparse.Namespace) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = (
        (arguments.tokens, arguments.hidden),
        (arguments.vocab, arguments.hidden),
        (arguments.tokens, arguments.teacher_hidden),
        (arguments.vocab, arguments.teacher_hidden),
    )
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    for index in (1, 3):
        tensors[index] /= tensors[index].shape[1] ** 0.5  # logits of variance 1
    return tuple(tensor.bfloat16().requires_grad_(index < 2) for index, tensor in enumerate(tensors))


def measure(
    arguments: argparse.Namespace, compute: Loss, inputs: tuple[torch.Tensor, ...]
) -> tuple[float, float, float]:
    """Return a call's median time in ms, its memory in GiB (0 without CUDA), and the loss."""
    has_cuda = torch.cuda.is_available()
    times, memory = [], 0.0
    for call in range(3 + arguments.repeats):
        for tensor in inputs[:2]:
            tensor.grad = None
        gc.collect()
        if has_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        loss = compute(*inputs)
        loss.backward()
        if has_cuda:
            torch.cuda.synchronize()
            memory = (torch.cuda.max_memory_allocated() - before) / 2**30
        if call >= 3:
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times), memory, float(loss.detach())


def main() -> None:
    arguments = parse_arguments()
    liger = liger_losses(arguments)
    arms = {
        "plain, all logits": plain_loss(arguments),
        "torpor.losses": our_loss(arguments, has_kernels=True),
        "torpor.losses, PyTorch": our_loss(arguments, has_kernels=False),
        **liger,
    }
    inputs = make_inputs(arguments)
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in arms}
    for _ in range(arguments.rounds):
        for name, compute in arms.items():
            results[name].append(measure(arguments, compute, inputs))
    medians = {
        name: tuple(statistics.median(column) for column in zip(*rows, strict=True))
        for name, rows in results.items()
    }
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{where}, torch {torch.__version__}, {arguments}")
    if not liger:
        print("without Liger Kernel, which needs CUDA and `pip install liger-kernel`")
    first = medians["plain, all logits"][0]
    print(f"{'':<26}{'ms':>10}{'ratio':>8}{'GiB':>8}{'loss':>12}")
    for name, (milliseconds, gib, loss) in medians.items():
        memory = f"{gib:>8.2f}" if gib else f"{'-':>8}"
        print(f"{name:<26}{milliseconds:>10.2f}{milliseconds / first:>8.3f}{memory}{loss:>12.6f}")
    print(
        json.dumps({name: {"ms": ms, "gib": gib, "loss": loss} for name, (ms, gib, loss) in medians.items()})
    )


if __name__ == "__main__":
    main()
