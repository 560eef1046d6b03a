"""`torpor graft` as a user runs it: from a folder that inspect complains of to one that verify passes."""

import json
import os
import subprocess
import sys

from golden_folders import write_golden


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "torpor", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )


def test_from_inspect_to_verify(tmp_path):
    """The command that inspect prints, run, gives a folder that verify and inspect pass."""
    source = write_golden(tmp_path / "source", "deepseek_v3")
    tuned = write_golden(tmp_path / "tuned", "deepseek_v3", seed=1, heads=False)
    done = run("inspect", tuned, "--json")
    assert done.returncode == 1
    command = json.loads(done.stdout)["problems"][0].split(": torpor ")[1].replace("SOURCE", str(source))
    done = run(*command.split())
    assert done.returncode == 0, done.stderr
    assert "30 MTP tensors, byte for byte" in done.stdout
    assert f"torpor verify {source} {tuned}-with-heads" in done.stdout
    assert done.stderr == ""
    assert run("inspect", f"{tuned}-with-heads").returncode == 0
    assert run("verify", source, f"{tuned}-with-heads").returncode == 0


def test_json(tmp_path):
    """The last line of stdout is one object."""
    source = write_golden(tmp_path / "source", "qwen3_5")
    tuned = write_golden(tmp_path / "tuned", "qwen3_5", seed=1, heads=False, mtp_num_hidden_layers=0)
    done = run("graft", "--heads", source, "--trunk", tuned, "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"] is True
    assert report["config_changes"] == ["mtp_num_hidden_layers"]


def test_refused(tmp_path):
    """Exit 2, one message, no traceback, no folder."""
    source = write_golden(tmp_path / "source", "qwen3_5")
    other = write_golden(tmp_path / "other", "qwen3_5", heads=False, hidden_size=8)
    done = run("graft", "--heads", source, "--trunk", other, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "hidden_size 8" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()
