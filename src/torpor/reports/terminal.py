"""Results as tables for people, and progress of work that reads or writes a lot."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from torpor.checkpoints.families import MTPLayerCount
from torpor.checkpoints.graft import GraftResult
from torpor.checkpoints.header import TensorEntry
from torpor.checkpoints.inspect import Inspection
from torpor.checkpoints.receipt import ReceiptResult
from torpor.checkpoints.verify import State, VerifyResult

MTP_PROBLEMS: tuple[State, ...] = ("differing", "missing", "unexpected")
# Problems that the table spells out before it only counts.
MAX_PROBLEMS = 20
SHA256_SHOWN = 12
MAX_FILES = 4
# Output that goes to a file or a pipe has no width of its own; the longest names fit into this.
PLAIN_WIDTH = 160
PLAIN_PROGRESS_S = 10.0


def print_verification(result: VerifyResult, console: Console | None = None) -> None:
    """Print what a verification found.

    Args:
        result: Its result.
        console: Where to; stdout where None.
    """
    console = _table_console(console)
    tensors = sum(tensor.source is not None for tensor in result.mtp)
    console.print(Text(f"{result.source} -> {result.export} ({result.family})"), soft_wrap=True)
    table = Table()
    table.add_column("part")
    table.add_column("tensors", justify="right")
    table.add_column("finding")
    findings = [f"{len(result.mtp_names('identical'))} identical"]
    for state in MTP_PROBLEMS:
        if number := len(result.mtp_names(state)):
            findings.append(f"{number} {state}")
    table.add_row("MTP layers", str(tensors), ", ".join(findings))
    if result.copies:
        stale = len(result.stale_copies)
        table.add_row("copies of the trunk", str(len(result.copies)), f"{stale} stale")
    findings = [f"{result.trunk_changed} changed"]
    for word, names in _trunk_problems(result):
        if names:
            findings.append(f"{len(names)} {word}")
    table.add_row("trunk", str(result.trunk_tensors), ", ".join(findings))
    table.add_row("layers in the source", "", _describe(result.source_count))
    table.add_row("layers in the export", "", _describe(result.export_count))
    if result.config_changed:
        table.add_row("config.json", "", Text(f"changed: {', '.join(result.config_changed)}"))
    console.print(table)

    problems = list(_problems(result))
    if problems:
        console.print("what differs:")
        details = Table()
        details.add_column("tensor", overflow="fold")
        details.add_column("problem")
        details.add_column("source", overflow="fold")
        details.add_column("export", overflow="fold")
        for problem in problems[:MAX_PROBLEMS]:
            details.add_row(*(Text(cell) for cell in problem))
        console.print(details)
        _print_rest(len(problems), console)
    if result.ok:
        console.print(f"ok: all {tensors} MTP tensors are byte-identical to their source's", style="green")
    else:
        console.print("FAILED: do not ship this export", style="bold red")


def print_inspection(result: Inspection, console: Console | None = None) -> None:
    """Print what an inspection found.

    Args:
        result: Its result.
        console: Where to; stdout where None.
    """
    console = _table_console(console)
    console.print(Text(f"{result.path} ({result.family}): {_describe(result.count)}"), soft_wrap=True)
    table = Table()
    table.add_column("part")
    for column in ("tensors", "parameters", "size"):
        table.add_column(column, justify="right")
    table.add_column("dtypes")
    table.add_column("files", overflow="fold")
    table.add_row("trunk", str(result.trunk_tensors), "", _describe_bytes(result.trunk_bytes))
    for layer in result.layers:
        table.add_row(
            f"MTP layer {layer.depth}",
            str(layer.tensors),
            f"{layer.parameters:,}",
            _describe_bytes(layer.nbytes),
            ", ".join(f"{number} {dtype}" for dtype, number in layer.dtypes.items()),
            ", ".join(layer.files[:MAX_FILES])
            + (f" and {len(layer.files) - MAX_FILES} more" if len(layer.files) > MAX_FILES else ""),
        )
    console.print(table)
    for name, trunk in result.copies:
        console.print(Text(f"{name} copies {trunk} (by name and shape; verify compares the bytes)"))
    for consumer, says in result.consumers.items():
        console.print(Text(f"{consumer}: {says}"), soft_wrap=True)
    if result.count.missing:
        console.print("missing:")
        for name in result.count.missing[:MAX_PROBLEMS]:
            console.print(Text(f"  {name}"), soft_wrap=True)
        if len(result.count.missing) > MAX_PROBLEMS:
            console.print(f"  and {len(result.count.missing) - MAX_PROBLEMS} more; --json lists all")
    for problem in result.problems:
        console.print(Text(f"problem: {problem}", style="bold red"), soft_wrap=True)
    if result.ok:
        console.print("ok: what config.json declares is there and complete", style="green")


def print_receipt(result: ReceiptResult, console: Console | None = None) -> None:
    """Print how a folder compares with the receipt of what it once was.

    Args:
        result: The comparison.
        console: Where to; stdout where None.
    """
    console = console or Console(highlight=False)
    console.print(Text(f"{result.export} against {result.receipt} ({result.family})"), soft_wrap=True)
    problems = [
        *(f"{name} has other bytes, dtype or shape" for name in result.differing),
        *(f"{name} is missing" for name in result.missing),
        *(f"{name} is not in the receipt" for name in result.unexpected),
        *(["config.json has changed"] if result.is_config_changed else []),
    ]
    for problem in problems[:MAX_PROBLEMS]:
        console.print(Text(f"problem: {problem}", style="bold red"), soft_wrap=True)
    _print_rest(len(problems), console)
    if result.ok:
        console.print(f"ok: all {result.tensors} tensors are what the receipt says", style="green")
    else:
        console.print("FAILED: this is not the folder that was verified", style="bold red")


def _table_console(console: Console | None) -> Console:
    """Return the console, or stdout; wide enough for tables where it is no terminal."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def _print_rest(num_problems: int, console: Console) -> None:
    """Say how many problems were left out."""
    if num_problems > MAX_PROBLEMS:
        console.print(f"and {num_problems - MAX_PROBLEMS} more; --json lists all")


def print_graft(result: GraftResult, console: Console | None = None) -> None:
    """Print what a graft did.

    Args:
        result: Its result.
        console: Where to; stdout where None.
    """
    console = console or Console(highlight=False)
    lines = [
        f"{result.out} ({result.family}): {result.trunk} with the MTP layers of {result.heads}",
        f"{len(result.mtp)} MTP tensors, byte for byte from {result.heads}",
    ]
    if result.kept:
        lines.append(f"{len(result.kept)} MTP tensors were there already, as they have to be")
    if result.copies:
        lines.append(f"{len(result.copies)} copies of trunk tensors, from {result.trunk}")
    lines += [f"{_describe_bytes(nbytes)} of its files {how}" for how, nbytes in result.placed_bytes.items()]
    lines.append(f"{_describe_bytes(result.written_bytes)} written")
    if result.config_changes:
        lines.append(f"changed in the configuration: {', '.join(result.config_changes)}")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    if result.placed_bytes.get("hard-linked"):
        console.print(
            Text(f"hard-linked files are those of {result.trunk}: replace them, never write into them"),
            soft_wrap=True,
        )
    console.print(Text(f"check it: torpor verify {result.heads} {result.out}", style="green"), soft_wrap=True)


@contextmanager
def byte_progress(what: str, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show how far some reading or writing has come: a bar on a terminal, a line now and then elsewhere.

    Args:
        what: What is being done, such as "verifying".
        console: Where to; stderr where None.

    Yields:
        A function to call with the bytes done and the bytes in all.
    """
    console = console or Console(stderr=True)
    if console.is_terminal:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress("{task.description}", *columns, console=console, transient=True) as bar:
            task = bar.add_task(what)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return

    start = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PLAIN_PROGRESS_S and done:
            last = now
            rate = done / (now - start)
            console.print(
                f"{what}: {done / 2**30:.1f} of {total / 2**30:.1f} GiB, {rate / 2**20:.0f} MiB/s,"
                f" {(total - done) / rate:.0f} s left",
                soft_wrap=True,
            )

    yield show


def _trunk_problems(result: VerifyResult) -> list[tuple[str, tuple[str, ...]]]:
    return [
        ("missing", result.trunk_missing),
        ("unexpected", result.trunk_unexpected),
        ("of another dtype or shape", result.trunk_mismatched),
    ]


def _problems(result: VerifyResult) -> Iterator[tuple[str, str, str, str]]:
    for tensor in result.mtp:
        if tensor.state != "identical":
            yield (
                tensor.name,
                tensor.state,
                _describe_tensor(tensor.source, tensor.source_sha256),
                _describe_tensor(tensor.export, tensor.export_sha256),
            )
    for name in result.stale_copies:
        yield name, "is not the export's trunk tensor, as it was the source's", "", ""
    for word, names in _trunk_problems(result):
        for name in names:
            yield name, f"trunk, {word}", "", ""
    for problem in result.quantization_problems:
        yield "quantisation", problem, "", ""
    for where, count in (("source", result.source_count), ("export", result.export_count)):
        if not count.agree:
            yield f"{count.field} of the {where}", "disagrees with its tensors", "", ""
    if result.source_count.declared != result.export_count.declared:
        declared = (str(result.source_count.declared), str(result.export_count.declared))
        yield result.source_count.field, "config.json has changed", *declared


def _describe_tensor(entry: TensorEntry | None, sha256: str | None) -> str:
    if entry is None or sha256 is None:
        return "-"
    return f"{entry.file.name} {entry.dtype} {list(entry.shape)} {sha256[:SHA256_SHOWN]}"


def _describe_bytes(nbytes: int) -> str:
    unit = next((unit for unit in (2**40, 2**30, 2**20, 2**10) if nbytes >= unit), 1)
    name = {2**40: "TiB", 2**30: "GiB", 2**20: "MiB", 2**10: "KiB", 1: "B"}[unit]
    return f"{nbytes} B" if unit == 1 else f"{nbytes / unit:.1f} {name}"


def _describe(count: MTPLayerCount) -> str:
    declared = "not declared" if count.declared is None else f"{count.declared} declared"
    return f"{declared}, {count.physical} exist, {count.written} complete"
