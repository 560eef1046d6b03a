"""`torpor verify` as a user runs it: exit code, table or JSON on stdout, refusals on stderr."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from sabotage import drop, flip_bit, retype, set_config, write_changed


def run_verify(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "torpor", "verify", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.write_nemotron_h(tmp_path_factory.mktemp("verify") / "source", pattern="M*", tokenizer=False)


def test_sound_export(source, tmp_path):
    """Exit 0; the table and nothing else."""
    done = run_verify(source, write_changed(source, tmp_path / "export", flip_bit("lm_head.weight")))
    assert done.returncode == 0, done.stderr
    assert "22 identical" in done.stdout
    assert "1 changed" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (flip_bit("mtp.layers.0.hnorm.weight"), None),
        (drop("mtp.layers.0.hnorm.weight"), None),
        (drop("mtp."), None),
        (retype("mtp.layers.0.hnorm.weight", "I32"), None),
        (drop("backbone.norm_f.weight"), None),
        (lambda tensor: tensor, {"num_nextn_predict_layers": 2}),
    ],
    ids=["flipped bit", "dropped tensor", "dropped heads", "other dtype", "dropped trunk", "other count"],
)
def test_wrong_export(source, tmp_path, change, config):
    """Exit 1, and the JSON says so too."""
    export = write_changed(source, tmp_path / "export", change, config=config)
    done = run_verify(source, export, "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["ok"] is False
    done = run_verify(source, export)
    assert done.returncode == 1
    assert "FAILED" in done.stdout


def test_json(source, tmp_path):
    """The last line of stdout is one object with the documented keys."""
    done = run_verify(source, write_changed(source, tmp_path / "export"), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"] is True
    assert {"tensors", "identical", "differing", "missing", "unexpected"} <= report["mtp"].keys()
    assert {"tensors", "stale"} <= report["copies"].keys()
    assert {"tensors", "changed", "missing", "unexpected"} <= report["trunk"].keys()
    assert report["config"] == {"declared": 1, "physical": 1, "written": 1}


def test_refused_input(source, tmp_path):
    """Exit 2, one message on stderr, no traceback and nothing on stdout."""
    export = write_changed(source, tmp_path / "export")
    truncated = next(export.glob("*.safetensors"))
    truncated.write_bytes(truncated.read_bytes()[:-1])
    other = write_changed(source, tmp_path / "other")
    set_config(other, model_type="llama")
    for arguments, message in (
        ((source, export), "truncated"),
        ((source, tmp_path / "nope"), "does not exist"),
        ((tmp_path / "nope", source), "does not exist"),
        ((other, other), "'llama'; known are"),
        ((source,), "Missing argument"),
        ((source, source, "--unknown"), "No such option"),
    ):
        done = run_verify(*arguments)
        assert done.returncode == 2, done
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


def test_receipt(source, tmp_path):
    """Written with a source, checked without one, refused where there is one already."""
    export, receipt = (
        write_changed(source, tmp_path / "export", flip_bit("lm_head.weight")),
        tmp_path / "r.json",
    )
    done = run_verify(source, export, "--receipt", receipt)
    assert done.returncode == 0, done.stderr
    assert receipt.exists()
    done = run_verify("--receipt", receipt, export)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok: all" in done.stdout
    done = run_verify("--receipt", receipt, source, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["differing"] == ["lm_head.weight"]
    done = run_verify(source, export, "--receipt", receipt)
    assert done.returncode == 2
    assert "exists" in done.stderr


def test_no_receipt_for_a_wrong_export(source, tmp_path):
    """Exit 1, and no file."""
    export = write_changed(source, tmp_path / "export", flip_bit("mtp.layers.0.hnorm.weight"))
    done = run_verify(source, export, "--receipt", tmp_path / "r.json")
    assert done.returncode == 1
    assert not (tmp_path / "r.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_cannot_be_written(source, tmp_path, options):
    """One line on stderr and not a traceback; exit 2, since nobody can read what was found."""
    export = write_changed(source, tmp_path / "export")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "torpor", "verify", str(source), str(export), *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "output cannot be written: No space left on device\n"
