"""The benchmark scripts run at small sizes, and their arms compute the same loss."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("options", [[], ["--divergence", "jensen_shannon", "--temperature", "2"]])
def test_losses(options):
    table, values = run("losses.py", "--tiny", *options)
    assert "without Liger Kernel" in table
    assert values["torpor.losses"]["loss"] == pytest.approx(values["plain, all logits"]["loss"], rel=2e-2)


def test_distillation():
    table, values = run("distillation.py", "--tiny", "--recompute")
    arms = [line[:3] for line in table.splitlines() if line.startswith("(")]
    assert arms == ["(a)", "(b)", "(c)", "(d)", "(a'"]
    losses = [value["first_loss"] for value in values.values()]
    assert losses == pytest.approx([losses[0]] * 5, rel=2e-2)
    asleep, absent = (values[name]["first_loss"] for name in values if name.startswith(("(c)", "(d)")))
    assert asleep == absent
