"""Teach a small language model to sort digits with GRPO, its MTP head asleep.

    python examples/grpo/sort_digits.py OUT            # about a minute on a CPU, no GPU needed

A prompt is three digits and a separator, the response three digits; a digit in its right place earns a third
of the reward. The model starts with random weights, so all that it learns it learns from rewards:

1. sample several responses to each prompt from the policy;
2. reward each, and compare it with the others of its prompt: the advantage (GRPO, arXiv:2402.03300);
3. raise the likelihood of responses with positive advantages, within the clipped ratio of PPO and not too far
   from a frozen reference;
4. at the end, export the policy in Hugging Face's format and verify that its head is the one it started with.

Policy and reference have an MTP head. `torpor.freeze_mtp` puts it to sleep in both; nothing else here knows
that there is one.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import torpor
from torpor import policy
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.verify import verify_folders
from torpor.megatron import parallel
from torpor.megatron.checkpointing import save_checkpoint
from torpor.megatron.models import build_model
from torpor.megatron.weights import export_folder, load_weights, write_folder
from torpor.training.loop import wrap_for_training

DIGITS = 3
SEPARATOR = 10  # ids 0 to 9 are the digits
LAYOUT = parallel.Layout()  # one rank; the model code below is the same for tensor and pipeline parallelism
MODEL = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,  # the MTP head
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": True,
    "initializer_range": 0.1,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 16,
}


def load_asleep(folder: Path) -> tuple[list[torch.nn.Module], Any]:
    """Build the model of a folder, load its weights and put its MTP head to sleep."""
    source = open_folder(folder)
    chunks = build_model(source.config, LAYOUT, torch.float32)
    load_weights(chunks, source)
    return chunks, torpor.freeze_mtp(chunks)


def draw_prompts(num_prompts: int, group_size: int, generator: torch.Generator) -> torch.Tensor:
    """Return each prompt as often as there will be responses to it [num_prompts * group_size, DIGITS + 1]."""
    digits = torch.randint(0, 10, (num_prompts, DIGITS), generator=generator)
    prompts = torch.nn.functional.pad(digits, (0, 1), value=SEPARATOR)
    return prompts.repeat_interleave(group_size, dim=0)


@torch.no_grad()
def sample(model: torch.nn.Module, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return prompts with sampled responses [b, s]; an ordinary forward, in which the head stays asleep."""
    tokens = prompts
    for _ in range(DIGITS):
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits = model(tokens, positions, None)[:, -1]
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    return tokens


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """Return the share of digits in their right places [b]: checked, not judged."""
    right = tokens[:, :DIGITS].sort(dim=1).values
    return (tokens[:, -DIGITS:] == right).float().mean(dim=1)


def advantages_of(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return how much better each response is than others to its prompt, in standard deviations [b, 1]."""
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).view(-1, 1)


def grpo_loss(
    values: dict[str, torch.Tensor], batch: dict[str, torch.Tensor], settings: argparse.Namespace
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a micro-batch and what to report, from `policy.forward` on the last stage.

    Args:
        values: `log_probs` and `entropy` [b, s] of the policy being trained.
        batch: `old_log_probs`, `reference_log_probs` and `mask` [b, s], `advantages` [b, 1].
        settings: Clip range and the weights of KL and entropy.
    """

    def mean(per_token: torch.Tensor) -> torch.Tensor:
        return (per_token * batch["mask"]).sum() / batch["mask"].sum()

    ratio = (values["log_probs"] - batch["old_log_probs"]).exp()
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    gain = torch.min(ratio * batch["advantages"], clipped * batch["advantages"])
    # An estimate of KL(policy || reference) that is never negative: k3 of joschu.net/blog/kl-approx.html.
    log_ratio = batch["reference_log_probs"] - values["log_probs"]
    kl = mean(log_ratio.exp() - log_ratio - 1)
    entropy = mean(values["entropy"])
    loss = settings.kl * kl - mean(gain) - settings.entropy * entropy
    return loss, {"kl": kl.detach(), "entropy": entropy.detach()}


def update(chunks, optimizer, batch: dict[str, torch.Tensor], settings) -> dict[str, float]:
    """Do one optimizer step through Megatron's schedule, which is also what runs pipeline stages."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(batches: Iterator[dict[str, torch.Tensor]], chunk: torch.nn.Module):
        batch = next(batches)
        return policy.forward(chunk, batch["tokens"]), lambda values: grpo_loss(values, batch, settings)

    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([batch]),
        model=chunks,
        num_microbatches=1,
        seq_length=batch["tokens"].shape[1],
        micro_batch_size=len(batch["tokens"]),
        forward_only=False,
    )
    optimizer.step()
    return {name: value.item() for name, value in reports[0].items()}


def train(out: Path, settings: argparse.Namespace) -> dict:
    """Run everything; return first and last rewards and what verification found."""
    parallel.initialize(LAYOUT, seed=settings.seed)
    from torpor.megatron.optimizer import build_optimizer  # imports Megatron: after the host is prepared

    write_folder(build_model(MODEL, LAYOUT, torch.float32), MODEL, out / "start")

    reference, reference_handle = load_asleep(out / "start")
    reference[0].requires_grad_(False)
    chunks, handle = load_asleep(out / "start")
    chunks = wrap_for_training(chunks)
    optimizer = build_optimizer(
        chunks,
        lr=settings.lr,
        weight_decay=0.0,
        betas=(0.9, 0.95),
        eps=1e-8,
        clip_grad=1.0,
        distributed=False,
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(settings.seed)
    rewards, started = [], time.perf_counter()
    for step in range(1, settings.steps + 1):
        prompts = draw_prompts(settings.prompts, settings.group, generator)
        tokens = sample(chunks[0], prompts, generator)
        mask = torch.zeros_like(tokens)
        mask[:, DIGITS + 1 :] = (
            1  # entry t of log_probs is about token t, so the mask is that of the response
        )
        earned = reward(tokens)
        batch = {
            "tokens": tokens,
            "mask": mask,
            "advantages": advantages_of(earned, settings.group),
            "old_log_probs": policy.compute_log_probs(chunks, tokens)["log_probs"],
            "reference_log_probs": policy.compute_log_probs(reference, tokens)["log_probs"],
        }
        for _ in range(settings.epochs):
            report = update(chunks, optimizer, batch, settings)
        rewards.append(earned.mean().item())
        if step == 1 or step % 10 == 0:
            print(
                f"step {step:3}  reward {rewards[-1]:.3f}  sorted {(earned == 1).float().mean():.3f}"
                f"  entropy {report['entropy']:.2f}  kl {report['kl']:.2f}"
                f"  {time.perf_counter() - started:.0f} s",
                flush=True,
            )

    # Nothing executed, trained or changed the heads; then the same again, from the files.
    reference_handle.check()
    handle.check(optimizer)
    checkpoint = save_checkpoint(out / "checkpoints", settings.steps, chunks)
    export_folder(checkpoint, open_folder(out / "start"), out / "export")
    verified = verify_folders(out / "start", out / "export")
    parallel.shutdown()
    return {
        "ok": verified.ok,
        "mtp_identical": len(verified.mtp_names("identical")),
        "trunk_changed": verified.trunk_changed,
        "first_reward": sum(rewards[:5]) / len(rewards[:5]),
        "last_reward": sum(rewards[-5:]) / len(rewards[-5:]),
    }


def main() -> int:
    """Read the command line, train, print one line of JSON; 0 if the export is sound."""
    parser = argparse.ArgumentParser(description="GRPO on sorting digits, the MTP head asleep")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=64, help="prompts in a step")
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--epochs", type=int, default=2, help="optimizer steps on each batch of responses")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=0.2, help="range of the ratio around 1")
    parser.add_argument("--kl", type=float, default=0.02, help="weight of the KL to the reference")
    parser.add_argument("--entropy", type=float, default=0.03, help="weight of the entropy bonus")
    parser.add_argument("--seed", type=int, default=1)
    settings = parser.parse_args()
    settings.out.mkdir(parents=True)
    torch.set_num_threads(1)  # the model is too small for more
    result = train(settings.out, settings)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
