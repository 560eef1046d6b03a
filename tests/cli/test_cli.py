"""The command line as its users start it: real processes, real exit codes."""

import os
import subprocess
import sys
import time

import pytest

from torpor import __version__


def run(*arguments, env=None):
    """Run `python -m torpor ARGUMENTS` and return the finished process."""
    return subprocess.run(
        [sys.executable, "-m", "torpor", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **(env or {})},
    )


def run_python(code, env=None):
    """Run a few lines that use the command line from inside."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **(env or {})}
    )


RAISING = """
import torpor.cli, torpor
@torpor.cli.app.command()
def fail():
    raise torpor.{error}("subject has 3, needs 4\\n  where\\n  next step")
torpor.cli.app(["fail"])
"""


def test_help():
    finished = run("--help")
    assert finished.returncode == 0
    assert "Usage: python -m torpor" in finished.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["--version"]])
def test_torch_and_megatron_are_not_imported_before_a_command_runs(arguments):
    code = (
        "import sys, torpor.cli\n"
        f"try: torpor.cli.app({arguments!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'megatron', 'modelopt', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    finished = run_python(code)
    assert finished.returncode == 0, finished.stderr


def test_version():
    finished = run("--version")
    assert (finished.returncode, finished.stdout) == (0, f"torpor {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["hibernate"], "hibernate"), (["--depth"], "--depth"), (["demo", "--ranks", "3"], "--ranks")],
)
def test_wrong_usage_exits_with_2_and_prints_nothing_on_stdout(arguments, named):
    finished = run(*arguments)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert named in finished.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("ConfigError", 2),
        ("CheckpointError", 2),
        ("UnsupportedModelError", 2),
        ("MTPExecutedError", 1),
        ("MTPChangedError", 1),
        ("MTPTrainedError", 1),
    ],
)
def test_error_raised_on_purpose_becomes_one_message_without_traceback(error, code):
    finished = run_python(RAISING.format(error=error))
    assert finished.returncode == code
    assert finished.stdout == ""
    assert finished.stderr == f"{error}: subject has 3, needs 4\n  where\n  next step\n"


def test_bug_keeps_its_plain_traceback():
    finished = run_python(RAISING.replace("torpor.{error}", "RuntimeError"))
    assert finished.returncode == 1
    assert finished.stderr.startswith("Traceback (most recent call last)")
    assert "RuntimeError: subject has 3" in finished.stderr


def test_other_ranks_hold_back_then_say_who_they_are():
    start = time.perf_counter()
    finished = run_python(RAISING.format(error="ConfigError"), env={"RANK": "1", "WORLD_SIZE": "2"})
    assert time.perf_counter() - start > 3.0
    assert finished.returncode == 2
    assert finished.stderr.startswith("rank 1: ConfigError: subject has 3")


WARNING = """
import torpor.cli, warnings
@torpor.cli.app.command()
def warn():
    warnings.warn("other library's insides")
torpor.cli.app(["warn"])
"""


def test_warnings_of_libraries_stay_off_the_screen_unless_asked_for():
    assert run_python(WARNING).stderr == ""
    assert "other library's insides" in run_python(WARNING, env={"PYTHONWARNINGS": "default"}).stderr
