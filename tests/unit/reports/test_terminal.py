"""What people see of a verification, and of its progress."""

import io

import pytest
from rich.console import Console

import tiny
from sabotage import drop, flip_bit, write_changed
from torpor.checkpoints.graft import graft_folder
from torpor.checkpoints.inspect import inspect_folder
from torpor.checkpoints.receipt import check_receipt, write_receipt
from torpor.checkpoints.verify import verify_folders
from torpor.reports import terminal
from torpor.reports.terminal import (
    byte_progress,
    print_graft,
    print_inspection,
    print_receipt,
    print_verification,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.write_mimo(tmp_path_factory.mktemp("terminal") / "source", tokenizer=False)


def printed(result, show=print_verification) -> str:
    console = Console(file=io.StringIO(), highlight=False)
    show(result, console)
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


def test_inspection(source, tmp_path):
    """Layers with size and file; what is missing, by name; the command that puts it back."""
    text = printed(inspect_folder(source), print_inspection)
    assert "MTP layer 0" in text
    assert "model-00002-of-00002.safetensors" in text
    assert text.rstrip().endswith("ok: what config.json declares is there and complete")
    lost = write_changed(source, tmp_path / "lost", drop("model.mtp_layers."))
    text = printed(inspect_folder(lost), print_inspection)
    assert "1 declared, 0 exist, 0 complete" in text
    assert "  model.mtp_layers.0.input_proj.weight" in text
    assert f"torpor graft --heads SOURCE --trunk {lost}" in text
    assert "ok:" not in text


def test_graft(source, tmp_path):
    """What came from where, how much was written, and the command that checks it."""
    lost = write_changed(source, tmp_path / "lost", drop("model.mtp_layers."))
    text = printed(graft_folder(source, lost, tmp_path / "out"), print_graft)
    assert f"16 MTP tensors, byte for byte from {source}" in text
    assert "written" in text
    assert f"torpor verify {source} {tmp_path / 'out'}" in text


def test_receipt(source, tmp_path):
    """Every difference by name, and a last line that says what it comes to."""
    receipt = tmp_path / "receipt.json"
    write_receipt(verify_folders(source, source, hash_all=True), receipt)
    assert printed(check_receipt(receipt, source), print_receipt).rstrip().endswith("what the receipt says")
    changed = write_changed(
        source, tmp_path / "changed", flip_bit("lm_head.weight"), config={"rope_theta": 1}
    )
    text = printed(check_receipt(receipt, changed), print_receipt)
    assert "lm_head.weight has other bytes" in text
    assert "config.json has changed" in text
    assert text.rstrip().endswith("FAILED: this is not the folder that was verified")
