"""What MTP heads cost in training: running, with loss scale 0, frozen but running, asleep, and not built.

All arms train the same GPT trunk on the same batches, one arm after the other in several rounds of one
process, each in a fresh model, so that memory is each arm's own and the machine's drift hits all alike.
Prints a table of medians and ratios to the arm built without heads, and one line of JSON.

    python benchmarks/dormancy.py                 # one GPU: 1.1 B parameters, 131k vocabulary
    python benchmarks/dormancy.py --recompute     # the same with full recomputation
    python benchmarks/dormancy.py --attention local         # with Megatron's unfused attention
    python benchmarks/dormancy.py --layers 2 --hidden 64 --heads 4 --groups 2 --ffn 128 \
        --vocab 512 --sequence 64                 # anywhere
"""

import argparse
import gc
import json
import statistics
import time

import torch

from torpor import freeze_mtp
from torpor.megatron.host import is_cpu_host, prepare_host
from torpor.megatron.parallel import Layout, initialize, shutdown

ARMS = ("no heads built", "asleep (freeze_mtp)", "frozen, still run", "loss scale 0", "running")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--mtp-layers", type=int, default=1)
    parser.add_argument("--recompute", action="store_true", help="full activation recomputation")
    parser.add_argument(
        "--attention",
        choices=("auto", "local"),
        default="auto",
        help="PyTorch's or Megatron's local",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps an arm and round, after 3 untimed")
    return parser.parse_args()


def build(arguments: argparse.Namespace, arm: str) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    from torpor.megatron.capabilities import fused_kernels
    from torpor.megatron.specs import gpt_layer_spec, gpt_mtp_block_spec

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_attention_heads=arguments.heads,
        num_query_groups=arguments.groups,
        ffn_hidden_size=arguments.ffn,
        mtp_num_layers=None if arm == "no heads built" else arguments.mtp_layers,
        mtp_loss_scaling_factor=0.0 if arm == "loss scale 0" else 0.1,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        transformer_impl="local" if arguments.attention == "local" else "transformer_engine",
        attention_backend=AttnBackend[arguments.attention],
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=is_cpu_host(),
        **(recompute if arguments.recompute else {}),
        **fused_kernels(swiglu=True, rotary=True),
    )
    model = GPTModel(
        config,
        gpt_layer_spec(config),
        vocab_size=arguments.vocab,
        max_sequence_length=arguments.sequence,
        position_embedding_type="rope",
        mtp_block_spec=gpt_mtp_block_spec(config),
    ).to("cpu" if is_cpu_host() else "cuda")
    if arm == "asleep (freeze_mtp)":
        freeze_mtp(model)
    elif arm == "frozen, still run":
        model.mtp.requires_grad_(False)
    return model


def measure(arguments: argparse.Namespace, arm: str, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return the median step time in ms and the peak memory in GiB (0 without CUDA)."""
    model = build(arguments, arm)
    optimizer = torch.optim.AdamW(
        (p for p in model.parameters() if p.requires_grad), lr=1e-5, fused=not is_cpu_host()
    )
    if not is_cpu_host():
        torch.cuda.reset_peak_memory_stats()
    times = []
    for step in range(3 + arguments.steps):
        synchronize()
        start = time.perf_counter()
        model(**batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        if step >= 3:
            times.append(1000 * (time.perf_counter() - start))
    peak = 0.0 if is_cpu_host() else torch.cuda.max_memory_allocated() / 2**30
    del model, optimizer
    gc.collect()
    if not is_cpu_host():
        torch.cuda.empty_cache()
    return statistics.median(times), peak


def synchronize() -> None:
    if not is_cpu_host():
        torch.cuda.synchronize()


def main() -> None:
    arguments = parse_arguments()
    device = prepare_host()
    initialize(Layout(), seed=1)
    ids = torch.randint(0, arguments.vocab, (1, arguments.sequence + 1), device=device)
    size = arguments.sequence
    batch = {
        "input_ids": ids[:, :-1].contiguous(),
        "position_ids": torch.arange(size, device=device)[None],
        "attention_mask": torch.ones(1, 1, size, size, dtype=torch.bool, device=device).triu(1),
        "labels": ids[:, 1:].contiguous(),
    }
    results: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for _ in range(arguments.rounds):
        for arm in ARMS:
            results[arm].append(measure(arguments, arm, batch))
    medians = {
        arm: tuple(statistics.median(column) for column in zip(*rows, strict=True))
        for arm, rows in results.items()
    }
    base_time, base_peak = medians["no heads built"]
    where = "CPU" if is_cpu_host() else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, {arguments}")
    print(f"{'heads':<22}{'ms/step':>10}{'ratio':>8}{'peak GiB':>10}{'ratio':>8}")
    for arm, (milliseconds, peak) in medians.items():
        memory = f"{peak:>10.2f}{peak / base_peak:>8.3f}" if peak else f"{'-':>10}{'-':>8}"
        print(f"{arm:<22}{milliseconds:>10.1f}{milliseconds / base_time:>8.3f}{memory}")
    print(json.dumps({arm: {"ms": ms, "gib": gib} for arm, (ms, gib) in medians.items()}))
    shutdown()


if __name__ == "__main__":
    main()
