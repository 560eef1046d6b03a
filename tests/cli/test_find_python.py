"""`make` finds a Python that runs, not one that is merely named."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "find_python.sh"


def find(folder, *arguments):
    """Run the script with only `folder`/bin on PATH and `folder` as home."""
    (folder / "bin").mkdir(exist_ok=True)
    return subprocess.run(
        [shutil.which("bash"), str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={"PATH": str(folder / "bin"), "HOME": str(folder)},
    )


def write_python(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


WORKS = f'exec {sys.executable} "$@"'
IS_A_SHIM = "echo 'pyenv: python3.12: command not found' >&2; exit 127"
IS_OLD = "exit 1"  # the probe's answer on Python 3.11


def test_shim_that_fails_is_passed_over_for_pyenvs_own_python(tmp_path):
    write_python(tmp_path / "bin" / "python3.12", IS_A_SHIM)
    write_python(tmp_path / "bin" / "python3", IS_OLD)
    good = write_python(tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin" / "python", WORKS)
    finished = find(tmp_path)
    assert (finished.returncode, finished.stdout) == (0, f"{good}\n")


@pytest.mark.parametrize("name", ["python3.12", "python3.13", "python3", "python"])
def test_name_on_path_that_works_is_taken(tmp_path, name):
    write_python(tmp_path / "bin" / name, WORKS)
    assert find(tmp_path).stdout == f"{name}\n"


def test_nothing_found_names_what_was_tried_and_how_to_go_on(tmp_path):
    write_python(tmp_path / "bin" / "python3", IS_OLD)
    finished = find(tmp_path, "", "test")
    assert (finished.returncode, finished.stdout) == (2, "")
    for expected in ("No Python 3.12 or 3.13", "python3.12", "python3\n", "make test PYTHON="):
        assert expected in finished.stderr


def test_chosen_python_is_the_only_one_tried(tmp_path):
    write_python(tmp_path / "bin" / "python3.12", WORKS)
    chosen = write_python(tmp_path / "mine", IS_OLD)
    finished = find(tmp_path, str(chosen))
    assert (finished.returncode, finished.stdout) == (2, "")
    assert f"PYTHON={chosen} is not a Python 3.12 or 3.13" in finished.stderr
    assert find(tmp_path, "python3.12").stdout == "python3.12\n"
