"""What a distillation step costs: Model-Optimizer's with heads running and asleep, and `torpor distill`'s.

All arms train the same student on the same batches from the same teacher with one optimizer and one loop, one
arm after the other in several rounds of one process, each in fresh models, so that memory is each arm's own
and the machine's drift hits all alike. Prints a table of medians and one line of JSON.

The model-FLOP utilisation counts the matrix products of the trunks, three times the student's forward and
once the teacher's, nothing for recomputation or heads, and divides by the rate of a large product measured
here.

    python benchmarks/distillation.py                # one GPU: student 8 layers, teacher 16, 131k vocabulary
    python benchmarks/distillation.py --recompute    # the same with full recomputation in the student
    python benchmarks/distillation.py --tiny         # anywhere: a minute of small matrices, to try the script
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from torpor import freeze_mtp
from torpor.megatron.host import is_cpu_host, prepare_host
from torpor.megatron.parallel import Layout, initialize, shutdown


@dataclass(frozen=True)
class Arm:
    """One way to make a step."""

    name: str
    library: str  # whose loss: "modelopt" or "torpor"
    heads: str  # "running", "asleep" or "none"
    attention: str = "fused"  # or "local", Megatron's own


ARMS = (
    Arm("(a) Model-Optimizer, heads running", "modelopt", "running"),
    Arm("(b) Model-Optimizer, freeze_mtp", "modelopt", "asleep"),
    Arm("(c) torpor distill", "torpor", "asleep"),
    Arm("(d) torpor distill, built without heads", "torpor", "none"),
    Arm("(a') as (a), Megatron's local attention", "modelopt", "running", "local"),
)
SMALL = {"student_layers": 1, "teacher_layers": 1, "hidden": 64, "heads": 4, "groups": 2, "ffn": 64}
TINY = {
    "student_layers": 1,
    "teacher_layers": 2,
    "hidden": 32,
    "heads": 4,
    "groups": 2,
    "ffn": 48,
    "vocab": 128,
    "sequence": 32,
    "rounds": 1,
    "steps": 2,
    "matmul": 64,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--student-layers", type=int, default=8)
    parser.add_argument("--teacher-layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--mtp-layers", type=int, default=1)
    parser.add_argument("--recompute", action="store_true", help="full activation recomputation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps an arm and round, after 3 untimed")
    parser.add_argument("--matmul", type=int, default=8192, help="size of the product that gives the rate")
    parser.add_argument("--tiny", action="store_true", help="sizes that any machine can do")
    arguments = parser.parse_args()
    if arguments.tiny:
        vars(arguments).update(TINY)
    return arguments


def build_model(arguments: argparse.Namespace, arm: Arm, layers: int, *, recompute: bool) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    from torpor.megatron.capabilities import fused_kernels
    from torpor.megatron.specs import gpt_layer_spec, gpt_mtp_block_spec

    torch.manual_seed(layers)
    model_parallel_cuda_manual_seed(layers, force_reset_rng=True)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=arguments.hidden,
        num_attention_heads=arguments.heads,
        num_query_groups=arguments.groups,
        ffn_hidden_size=arguments.ffn,
        mtp_num_layers=None if arm.heads == "none" else arguments.mtp_layers,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="local" if arm.attention == "local" else "transformer_engine",
        attention_backend=AttnBackend.local if arm.attention == "local" else AttnBackend.auto,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=is_cpu_host(),
        **(full if recompute else {}),
        **fused_kernels(swiglu=True, rotary=True),
    )
    # Megatron writes its choice of attention here and asserts that it never changes.
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    model = GPTModel(
        config,
        gpt_layer_spec(config),
        vocab_size=arguments.vocab,
        max_sequence_length=arguments.sequence,
        position_embedding_type="rope",
        mtp_block_spec=gpt_mtp_block_spec(config) if config.mtp_num_layers else None,
    ).to("cpu" if is_cpu_host() else "cuda")
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # By name, so that a trunk has the same weights with heads and without.
            torch.manual_seed(zlib.crc32(f"{layers} layers: {name}".encode()))
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def build_job(arguments: argparse.Namespace, arm: Arm, windows):
    from torpor.training.config import OptimizationConfig
    from torpor.training.distillation import build_distillation_model, distillation_objective
    from torpor.training.loop import prepare_job
    from torpor.training.losses import LossSettings

    student = build_model(arguments, arm, arguments.student_layers, recompute=arguments.recompute)
    # Nothing of the teacher is kept for backward: there is nothing to recompute.
    teacher = build_model(arguments, arm, arguments.teacher_layers, recompute=False)
    if arm.heads == "asleep":
        freeze_mtp(student)
        freeze_mtp(teacher)
    if arm.library == "torpor":
        model, objective = build_distillation_model(student, teacher), distillation_objective(LossSettings())
    else:
        model, objective = convert_with_model_optimizer(student, teacher), model_optimizer_objective()
    settings = OptimizationConfig(
        sequence_length=arguments.sequence, global_batch_size=1, steps=10**6, dtype="bf16", lr=1e-5
    )
    return prepare_job([model], settings, windows, objective, steps=settings.steps)


def convert_with_model_optimizer(student: torch.nn.Module, teacher: torch.nn.Module) -> torch.nn.Module:
    """Model-Optimizer's distillation as its Megatron examples set it up: logits, forward KL, no LM loss."""
    import modelopt.torch.distill as mtd
    from modelopt.torch.distill.plugins.megatron import (
        DistillationConfig,
        adjust_distillation_model_for_mcore,
        setup_distillation_config,
    )

    settings = setup_distillation_config(DistillationConfig(), student.config, teacher.config)
    kind = {
        "teacher_model": teacher,
        "criterion": settings.criterion,
        "loss_balancer": settings.loss_balancer,
    }
    model = mtd.convert(student, mode=[("kd_loss", kind)])
    adjust_distillation_model_for_mcore(model, settings)
    return model


def model_optimizer_objective():
    from torpor.training.loop import Objective

    def forward_step(batches: Iterator, wrapped: torch.nn.Module):
        batch = next(batches)
        output = wrapped(
            input_ids=batch.tokens_BS,
            position_ids=batch.positions_BS,
            attention_mask=None,
            labels=batch.labels_BS,
        )

        def loss(losses_BS: torch.Tensor):
            model = wrapped.module
            losses = model.compute_kd_loss(losses_BS.mean(), lambda values: values[0].float().mean())
            return losses["kd_loss"], {"loss": losses["kd_loss"].detach().clone()}

        return output, loss

    return Objective(forward_step)


@dataclass(frozen=True)
class Measured:
    milliseconds: float
    peak_gib: float  # 0 without CUDA
    static_gib: float
    loss: float


def measure(arguments: argparse.Namespace, arm: Arm, windows) -> Measured:
    from torpor.training.loop import run_step

    job = build_job(arguments, arm, windows)
    times, static = [], 0.0
    for step in range(3 + arguments.steps):
        if step == 1 and not is_cpu_host():
            # Weights, gradients and optimizer state: what lives between two steps.
            gc.collect()
            static = torch.cuda.memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        start = time.perf_counter()
        record = run_step(job, step)
        synchronize()
        if step == 0:
            loss = record.metrics["loss"]
        if step >= 3:
            times.append(1000 * (time.perf_counter() - start))
    peak = 0.0 if is_cpu_host() else (torch.cuda.max_memory_allocated() + unused_in_graphs()) / 2**30
    del job
    gc.collect()
    if not is_cpu_host():
        torch.cuda.empty_cache()
    return Measured(statistics.median(times), peak, static, loss)


def unused_in_graphs() -> int:
    """Bytes that CUDA graphs keep for their replays and that do not count as allocated."""
    segments = torch.cuda.memory_snapshot()
    graphs = [segment for segment in segments if segment["segment_pool_id"] != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in graphs)


def step_flops(arguments: argparse.Namespace) -> float:
    """Floating-point operations of a step's matrix products, without recomputation and heads."""
    hidden, tokens = arguments.hidden, arguments.sequence
    keys_and_values = 2 * arguments.groups * hidden // arguments.heads
    layer = hidden * (hidden + keys_and_values) + hidden * hidden + 3 * hidden * arguments.ffn
    scores = 2 * tokens * tokens * hidden  # two products of 2 s^2 h, of which causal attention needs half

    def forward(layers: int) -> float:
        return 2 * tokens * (layers * layer + arguments.vocab * hidden) + layers * scores

    return 3 * forward(arguments.student_layers) + forward(arguments.teacher_layers)


def matmul_rate(size: int, device: torch.device) -> float:
    """Floating-point operations a second of a large BF16 product: the best of 20."""
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    times = []
    for _ in range(20):
        synchronize()
        start = time.perf_counter()
        left @ right
        synchronize()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def synchronize() -> None:
    if not is_cpu_host():
        torch.cuda.synchronize()


def main() -> None:
    arguments = parse_arguments()
    device = prepare_host()
    initialize(Layout(), seed=1)
    from torpor.training.data import PackedWindows

    results: dict[str, list[Measured]] = {arm.name: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.npy"
        count = arguments.sequence * (8 + arguments.steps) + 1
        np.save(path, np.random.RandomState(0).randint(0, arguments.vocab, count).astype(np.uint32))
        windows = PackedWindows(path, sequence_length=arguments.sequence, held_out=0.0, seed=1)
        rate = matmul_rate(arguments.matmul, device)
        # The libraries keep the first model of a process for good: let that be a small one.
        measure(argparse.Namespace(**vars(arguments) | SMALL), ARMS[0], windows)
        for _ in range(arguments.rounds):
            for arm in ARMS:
                results[arm.name].append(measure(arguments, arm, windows))
    report(arguments, results, rate)
    shutdown()


def report(arguments: argparse.Namespace, results: dict[str, list[Measured]], rate: float) -> None:
    where = "CPU" if is_cpu_host() else torch.cuda.get_device_name()
    flops = step_flops(arguments)
    print(f"{where}, torch {torch.__version__}, {arguments}")
    print(f"{flops / 1e12:.3g} TFLOP a step, products of {arguments.matmul} at {rate / 1e12:.3g} TFLOP/s")
    print(f"{'memory in GiB':<40}{'ms/step':>10}{'ratio':>8}{'peak':>8}{'static':>8}{'above':>8}{'MFU':>8}")
    values = {}
    first = statistics.median(measured.milliseconds for measured in results[ARMS[0].name])
    for arm in ARMS:
        rows = results[arm.name]
        milliseconds, peak, static = (
            statistics.median(getattr(row, name) for row in rows)
            for name in ("milliseconds", "peak_gib", "static_gib")
        )
        mfu = flops / (milliseconds / 1000) / rate
        memory = f"{peak:>8.2f}{static:>8.2f}{peak - static:>8.2f}" if peak else f"{'-':>8}" * 3
        print(f"{arm.name:<40}{milliseconds:>10.1f}{milliseconds / first:>8.3f}{memory}{mfu:>8.1%}")
        values[arm.name] = {
            "ms": milliseconds,
            "peak_gib": peak,
            "static_gib": static,
            "mfu": mfu,
            "first_loss": rows[0].loss,
        }
    print(json.dumps(values))


if __name__ == "__main__":
    main()
