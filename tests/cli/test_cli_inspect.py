"""`torpor inspect` as a user runs it: exit code, table or JSON on stdout, refusals on stderr."""

import json
import os
import subprocess
import sys

from golden_folders import write_golden


def run_inspect(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "torpor", "inspect", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )


def test_sound_folder(tmp_path):
    """Exit 0; a table that names layers, copies and programs."""
    done = run_inspect(write_golden(tmp_path / "f", "deepseek_v3"))
    assert done.returncode == 0, done.stderr
    for words in (
        "MTP layer 0",
        "model.layers.3.embed_tokens.weight copies",
        "vLLM: --speculative-config",
        "ok:",
    ):
        assert words in done.stdout
    assert done.stderr == ""


def test_lost_heads(tmp_path):
    """Exit 1, and the documented keys in the JSON."""
    folder = write_golden(tmp_path / "f", "qwen3_5", heads=False)
    done = run_inspect(folder)
    assert done.returncode == 1
    assert "1 declared, 0 exist, 0 complete" in done.stdout
    assert "torpor graft" in done.stdout
    done = run_inspect(folder, "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout.splitlines()[-1])
    documented = {
        "ok",
        "family",
        "declared",
        "physical",
        "mtp_tensors",
        "mtp_bytes",
        "missing",
        "copies",
        "problems",
    }
    assert documented <= report.keys()
    assert report["ok"] is False


def test_refused(tmp_path):
    """Exit 2, one message, no traceback."""
    for folder, message in (
        (tmp_path / "nope", "does not exist"),
        (write_golden(tmp_path / "f", "qwen3_5", model_type="qwen9"), "look like MTP"),
    ):
        done = run_inspect(folder)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
