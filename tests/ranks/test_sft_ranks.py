"""Two ranks fine-tune as one does: at every layout, the whole model or adapters, rows packed."""

import json

import pytest
import yaml

import tiny
from chats import chat, give_chat, write_records
from ranks.launch import run_ranks
from torpor.checkpoints.folder import open_folder

LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
TP_SP = {"tensor_parallel": 2, "sequence_parallel": True}
# Model, adapters, layout.
RUNS = {
    "dp2": ("mimo", None, {}),
    "pp2 tied": ("tied", None, {"pipeline_parallel": 2}),
    "tp2 sp hybrid": ("hybrid", None, TP_SP),
    "ep2 hybrid": ("hybrid", None, {"expert_parallel": 2}),
    "lora tp2": ("mimo", LORA, {"tensor_parallel": 2}),
    "lora tp2 sp hybrid": ("hybrid", LORA, TP_SP),
    "lora pp2 tied": ("tied", LORA, {"pipeline_parallel": 2}),
    "lora dp2 distributed": ("mimo", LORA, {"distributed_optimizer": True}),
}


def write_run(folder, name, model, lora, layout):
    values = {
        "model": model,
        "output": name.replace(" ", "-"),
        "data": "chat.jsonl",
        "sequence_length": 128,
        "global_batch_size": 4,
        "steps": 3,
        "lr": 1e-3,
        "eps": 1e-3,  # or the smallest of gradients would decide over whole steps
        "dtype": "fp32",
        "recompute": "full",
        "eval_batches": 1,
        "held_out": 0.1,
        "lora": lora,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values | layout))
    return path


def tune(path):
    from torpor.runs.sft import sft
    from torpor.training.config import SftConfig
    from torpor.training.config_file import read_config

    return sft(read_config(SftConfig, path))


def tune_all(paths, sabotaged, refused):
    """On each rank: the results of good runs, then those of one whose ranks forget each other's gradients."""
    from torpor.errors import TorporError
    from torpor.megatron import lora

    results = [tune(path) for path in paths]
    adapt = lora._adapt

    def forget(layer, *args, **kwargs):
        adapt(layer, *args, **kwargs)
        for parameter in (layer.lora_A, layer.lora_B):
            parameter.sequence_parallel = False

    lora._adapt = forget
    tune(sabotaged)
    try:
        tune(refused)
    except TorporError as error:
        return results, (type(error).__name__, str(error))


def steps_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "step"]


@pytest.mark.timeout(600)
def test_two_ranks_learn_what_one_learns(tmp_path, no_process_groups):
    give_chat(tiny.write_mimo(tmp_path / "mimo", seed=1))
    give_chat(tiny.write_mimo(tmp_path / "tied", seed=1, tie_word_embeddings=True))
    give_chat(tiny.write_nemotron_h(tmp_path / "hybrid", seed=1))
    # Answers of very different lengths: a mean of means would differ from the mean.
    records = [chat(f"count to {n}", " ".join(map(str, range(n)))) for n in range(1, 20)] * 2
    write_records(tmp_path / "chat.jsonl", records)

    single = {}
    for model, lora, _ in RUNS.values():
        name = f"one {model} {'lora' if lora else 'full'}"
        if name not in single:
            single[name] = tune(write_run(tmp_path, name, model, lora, {}))
    paths = [write_run(tmp_path, name, *run) for name, run in RUNS.items()]
    sabotaged = write_run(tmp_path, "sabotaged", "hybrid", LORA, TP_SP)
    write_records(tmp_path / "bad.jsonl", [chat("a", "b"), {"text": "no response"}])
    refused = write_run(tmp_path, "refused", "mimo", None, {"data": "bad.jsonl"})
    answers = run_ranks(tune_all, 2, paths, sabotaged, refused, timeout=500)
    assert answers[0] == answers[1]
    results, (kind, message) = answers[0]

    for name, (model, lora, _), result in zip(RUNS, RUNS.values(), results, strict=True):
        reference = single[f"one {model} {'lora' if lora else 'full'}"]
        assert steps_of(result.output) == [pytest.approx(s, rel=1e-3) for s in steps_of(reference.output)], (
            name
        )
        assert result.held_out["loss"] == pytest.approx(reference.held_out["loss"], rel=1e-3), name
        assert (result.mtp_executions, result.mtp_tensors) == (0, reference.mtp_tensors), name
        ours, theirs, source = (open_folder(f) for f in (result.export, reference.export, tmp_path / model))
        for tensor in theirs.tensors:
            if "mtp" in tensor:
                assert ours.sha256(tensor) == source.sha256(tensor), (name, tensor)
                continue
            difference = (ours.read_tensor(tensor) - theirs.read_tensor(tensor)).abs().max().item()
            moved = (theirs.read_tensor(tensor) - source.read_tensor(tensor)).abs().max().item()
            assert difference <= max(0.02 * moved, 1e-6), (name, tensor, difference, moved)
    assert steps_of(tmp_path / "sabotaged") != [
        pytest.approx(s, rel=1e-3) for s in steps_of(single["one hybrid lora"].output)
    ]
    # What rank 0 alone has read is an error on every rank and leaves nothing behind.
    assert kind == "ConfigError"
    assert "bad.jsonl:2" in message
    assert not (tmp_path / "refused").exists()
