"""The GRPO example: it learns from rewards alone, and what it exports has the heads it started with."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo" / "sort_digits.py"


@pytest.fixture
def example(no_process_groups):
    """The example as a module; the host is prepared before it is imported."""
    spec = importlib.util.spec_from_file_location("sort_digits", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def run(example, out, capsys, monkeypatch, *options):
    """Run it as a command; return its exit code and its line of JSON."""
    monkeypatch.setattr(sys, "argv", ["sort_digits.py", str(out), *map(str, options)])
    code = example.main()
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def verify(source, export):
    command = [sys.executable, "-m", "torpor", "verify", str(source), str(export), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode, json.loads(result.stdout.splitlines()[-1])


def test_it_learns_and_its_export_has_its_heads(example, tmp_path, capsys, monkeypatch):
    """From one right digit in 16 to two of three; one answer for all prompts would get one of four."""
    code, result = run(example, tmp_path / "out", capsys, monkeypatch, "--steps", 30)
    assert code == 0
    assert result["first_reward"] < 0.3
    assert result["last_reward"] > 0.66
    code, verified = verify(tmp_path / "out" / "start", tmp_path / "out" / "export")
    assert code == 0
    assert verified["ok"]
    assert verified["mtp"]["identical"] == verified["mtp"]["tensors"] == result["mtp_identical"] == 16
    assert verified["trunk"]["changed"] == verified["trunk"]["tensors"] == result["trunk_changed"]


def test_without_a_learning_rate_it_does_not(example, tmp_path, capsys, monkeypatch):
    """The improvement above is learnt: without steps rewards stay where they were, and so does the trunk."""
    code, result = run(example, tmp_path / "out", capsys, monkeypatch, "--steps", 10, "--lr", 0)
    assert code == 0
    assert result["last_reward"] < 0.15
    assert result["trunk_changed"] == 0


def test_heads_that_are_trained_do_not_get_out(example, tmp_path, capsys, monkeypatch):
    """With freeze_mtp taken out the run is refused; with the refusal taken out too the export is."""
    from torpor import MTPChangedError, UnsupportedModelError, policy

    class NoHandle:
        def check(self, optimizer=None):
            pass

    monkeypatch.setattr(example.torpor, "freeze_mtp", lambda chunks: NoHandle(), raising=False)
    with pytest.raises(UnsupportedModelError, match="awake"):
        run(example, tmp_path / "refused", capsys, monkeypatch, "--steps", 1)
    example.parallel.shutdown()
    monkeypatch.setattr(policy, "_refuse_awake", lambda model: None)
    with pytest.raises(MTPChangedError):
        run(example, tmp_path / "trained", capsys, monkeypatch, "--steps", 1)
    assert not (tmp_path / "trained" / "export").exists()


def test_rewards_and_advantages(example):
    """Checked by hand: 3 1 2 sorted is 1 2 3."""
    tokens = torch.tensor([[3, 1, 2, 10, 1, 2, 3], [3, 1, 2, 10, 1, 3, 2], [3, 1, 2, 10, 3, 1, 2]])
    assert example.reward(tokens).tolist() == pytest.approx([1, 1 / 3, 0])
    advantages = example.advantages_of(torch.tensor([1.0, 0.0, 5.0, 5.0]), group_size=2)
    assert advantages.flatten().tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0], abs=1e-3)
