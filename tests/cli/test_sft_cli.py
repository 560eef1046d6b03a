"""`torpor sft` as its users start it: a run, two ranks, a kill, refusals."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

import tiny
from chats import chat, give_chat, write_records
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.verify import verify_folders

SETTINGS = {
    "model": "model",
    "output": "run",
    "data": "chat.jsonl",
    "sequence_length": 128,
    "global_batch_size": 2,
    "steps": 4,
    "dtype": "fp32",
    "held_out": 0.1,
    "eval_batches": 1,
    "save_every": 2,
    "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj"]},
}


@pytest.fixture
def config(tmp_path):
    give_chat(tiny.write_mimo(tmp_path / "model", seed=1))
    records = [chat(f"count to {n}", " ".join(map(str, range(n)))) for n in range(1, 20)]
    write_records(tmp_path / "chat.jsonl", records)
    return write_config(tmp_path)


def write_config(folder, name="run.yaml", **changes):
    (folder / name).write_text(yaml.safe_dump(SETTINGS | changes))
    return folder / name


def start(*arguments, ranks=1):
    launcher = (
        ["-m"]
        if ranks == 1
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    )
    return subprocess.Popen(
        [sys.executable, *launcher, "torpor", "sft", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )


def run(*arguments, ranks=1, expect=0):
    process = start(*arguments, ranks=ranks)
    out, err = process.communicate(timeout=240)
    assert process.returncode == expect, f"exit {process.returncode}\n{out}\n{err}"
    return out, err


def test_a_run_ends_with_a_verified_export_and_answers_again(config, tmp_path):
    out, err = run(config, "--json", ranks=2)
    result = json.loads(out.splitlines()[-1])
    assert (result["ok"], result["steps"], result["mtp_executions"]) == (True, 4, 0)
    verified = verify_folders(tmp_path / "model", tmp_path / "run" / "export")
    assert verified.ok
    assert result["trunk_changed"] == verified.trunk_changed == 6  # q, k and v of two layers
    assert "loss per token" in out
    # What the user has to know and no library's chatter.
    expected = ("step ", "adapters of rank 4 on self_attention.linear_qkv; MTP layers", "19 samples in ")
    assert [line for line in err.splitlines() if not line.startswith(expected)] == []

    again, _ = run(config, "--json")
    assert again == out  # on one rank too: nothing is left to do
    export = tmp_path / "run" / "export"
    entry = next(e for name, e in open_folder(export).tensors.items() if "mtp" in name)
    content = bytearray(entry.file.read_bytes())
    content[entry.offset] ^= 1
    entry.file.write_bytes(content)
    out, err = run(config, expect=1)
    assert "Do not ship this export. `torpor verify MODEL EXPORT`" in err
    assert out == ""


def test_a_stopped_run_continues(config, tmp_path):
    config = write_config(tmp_path, steps=400, save_every=1, eval_batches=0)
    process = start(config)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.exists() or '"step": 2,' not in metrics.read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    done = int((tmp_path / "run" / "checkpoints" / "latest").read_text().removeprefix("step_"))
    out, _ = run(config, "--steps", done + 2, "--json")
    result = json.loads(out.splitlines()[-1])
    assert (result["ok"], result["resumed_from"], result["steps"]) == (True, done, done + 2)


def test_refusals_say_what_is_wrong_and_leave_with_2(config, tmp_path):
    _, err = run(tmp_path / "nowhere.yaml", expect=2)
    assert "nowhere.yaml: there is no such file" in err
    assert "torpor sft --help" in err
    (tmp_path / "text.jsonl").write_text('{"text": "no response"}\n')
    _, err = run(write_config(tmp_path, "text.yaml", data="text.jsonl"), expect=2)
    assert "text.jsonl:1 has `text`" in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_help_shows_the_options(config):
    out, _ = run("--help")
    for part in ("--freeze-mtp", "--output", "--steps", "--json", "responses", "torchrun"):
        assert part in out
