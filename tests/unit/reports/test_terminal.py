"""What people see of a verification, and of its progress."""

import io

import pytest
from rich.console import Console

import tiny
from sabotage import drop, flip_bit, write_changed
from torpor.checkpoints.verify import verify_folders
from torpor.reports import terminal
from torpor.reports.terminal import byte_progress, print_verification


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.write_mimo(tmp_path_factory.mktemp("terminal") / "source", tokenizer=False)


def printed(result) -> str:
    console = Console(file=io.StringIO(), highlight=False)
    print_verification(result, console)
    return console.file.getvalue()


def test_sound_export(source, tmp_path):
    """Counts of both parts and a last line that says it passed."""
    export = write_changed(source, tmp_path / "export", flip_bit("lm_head.weight"))
    text = printed(verify_folders(source, export))
    assert "16 identical" in text
    assert "1 changed" in text
    assert "1 declared, 1 exist, 1 complete" in text
    assert text.rstrip().endswith("ok: all 16 MTP tensors are byte-identical to their source's")
    assert "what differs" not in text


def test_failed_export(source, tmp_path):
    """Every tensor that differs, with the beginning of both hashes, and a last line that says it failed."""
    name = "model.mtp_layers.0.input_proj.weight"
    export = write_changed(source, tmp_path / "export", flip_bit(name))
    result = verify_folders(source, export)
    (tensor,) = [t for t in result.mtp if t.state == "differing"]
    text = printed(result)
    assert text.rstrip().endswith("FAILED: do not ship this export")
    (line,) = [line for line in text.splitlines() if name in line]
    assert tensor.source_sha256[:12] in line
    assert tensor.export_sha256[:12] in line


def test_many_problems(source, tmp_path, monkeypatch):
    """Beyond a screenful they are counted."""
    monkeypatch.setattr(terminal, "MAX_PROBLEMS", 3)
    result = verify_folders(source, write_changed(source, tmp_path / "export", drop("model.mtp_layers.")))
    text = printed(result)
    assert "16 missing" in text
    # Sixteen tensors and the configuration that still counts them.
    assert "and 14 more; --json lists all" in text


def test_names_are_not_markup(source, tmp_path):
    """A tensor or a folder whose name looks like a style is printed as it is."""
    out = tmp_path / "[bold]export"
    export = write_changed(source, out, add=(("[red]x[/red]", "U8", (1,), b"x"),))
    text = printed(verify_folders(source, export))
    assert "[red]x[/red]" in text
    assert "[bold]export (mimo)" in text


def test_plain_progress(monkeypatch):
    """Without a terminal there is a line now and then, with a rate and what is left."""
    now = iter([0.0, 1.0, 11.0, 12.0, 22.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    console = Console(file=io.StringIO(), width=30)
    with byte_progress("verifying", console) as progress:
        for gib in (1, 11, 12, 22):
            progress(gib * 2**30, 44 * 2**30)
    assert console.file.getvalue().splitlines() == [
        "verifying: 11.0 of 44.0 GiB, 1024 MiB/s, 33 s left",
        "verifying: 22.0 of 44.0 GiB, 1024 MiB/s, 22 s left",
    ]


def test_progress_on_a_terminal():
    """A bar that is gone afterwards."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with byte_progress("verifying", console) as progress:
        progress(1, 4)
        progress(4, 4)
    assert "verifying" in console.file.getvalue()
