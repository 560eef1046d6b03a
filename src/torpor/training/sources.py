"""Files and saved datasets that hold training data: finding them and reading them, record by record."""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torpor.errors import ConfigError

_SUFFIXES = (".txt", ".jsonl", ".parquet")
_ROWS_PER_CALL = 512


@dataclass(frozen=True)
class Source:
    """One file or saved dataset that holds documents."""

    path: Path
    kind: str  # "txt", "jsonl", "parquet" or "dataset"


def find_sources(paths: Iterable[Path]) -> list[Source]:
    """List the files and saved datasets under `paths`, in a fixed order.

    Args:
        paths: text files, folders of them (searched recursively), or folders written by `save_to_disk`.

    Returns:
        At least one source, without repetitions.

    Raises:
        ConfigError: a path is missing, of an unknown kind, or a folder holds nothing readable.
    """
    sources: dict[Path, Source] = {}
    for path in paths:
        for source in _expand(path):
            sources.setdefault(source.path, source)
    return list(sources.values())


def _expand(path: Path) -> list[Source]:
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise ConfigError(
                f"`data`: {path} ends in {path.suffix or 'nothing'!r}\n"
                f"  Known are {', '.join(_SUFFIXES)} files and datasets saved with `save_to_disk`."
            )
        return [Source(path, path.suffix[1:])]
    if not path.is_dir():
        raise ConfigError(f"`data`: {path} does not exist\n  Give the path of a file or folder of text.")
    if _is_saved_dataset(path):
        return [Source(path, "dataset")]
    found = [
        Source(file, file.suffix[1:])
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.suffix in _SUFFIXES
    ]
    if not found:
        raise ConfigError(
            f"`data`: the folder {path} holds no {', '.join(_SUFFIXES)} file and is no saved dataset\n"
            "  Give a folder with text in it."
        )
    return found


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def list_files(sources: Iterable[Source]) -> list[tuple[str, int, int]]:
    """Name, size and time of every file of the sources: what tells that one of them has changed."""
    facts = []
    for source in sources:
        files = [source.path] if source.path.is_file() else sorted(source.path.rglob("*"))
        facts += [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
    return facts


def read_documents(source: Source, text_key: str) -> Iterator[str]:
    """Yield the texts of one source in order; blank ones are left out.

    Args:
        source: a file or saved dataset.
        text_key: the field (or column) of a record that holds its text.

    Raises:
        ConfigError: a record has no such field, or the file is not what its name says; with the place.
    """
    read: Callable[[Path, str], Iterator[str]] = {
        "txt": _read_txt,
        "jsonl": _read_jsonl,
        "parquet": _read_parquet,
        "dataset": _read_dataset,
    }[source.kind]
    for text in read(source.path, text_key):
        if text.strip():
            yield text


def read_records(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of one source in order, each with its place for messages.

    Args:
        source: a `.jsonl` or `.parquet` file or a saved dataset.

    Raises:
        ConfigError: the source has no records, or one is no object; with the place.
    """
    if source.kind == "txt":
        raise ConfigError(
            f"`data`: {source.path} is plain text, which has no records\n"
            "  Give .jsonl or .parquet files, or saved datasets."
        )
    if source.kind == "jsonl":
        for where, record in _jsonl_records(source.path):
            if not isinstance(record, dict):
                raise ConfigError(
                    f"`data`: {where} is a {type(record).__name__}, not an object\n"
                    "  A .jsonl file has one object per line."
                )
            yield where, record
        return
    number = 0
    for rows in _table_rows(source):
        for row in rows:
            number += 1
            yield f"{source.path} row {number}", _without_absent(row)


def _without_absent(value: Any) -> Any:
    """A value of a table without the fields that are None.

    In a table every record has the fields of all, at every depth: a call of one tool has the arguments of the
    other tools, each None.
    """
    if isinstance(value, dict):
        return {name: _without_absent(field) for name, field in value.items() if field is not None}
    return [_without_absent(item) for item in value] if isinstance(value, list) else value


def _table_rows(source: Source) -> Iterator[list[dict[str, Any]]]:
    if source.kind == "parquet":
        with _open_parquet(source.path) as file:
            for batch in file.iter_batches():
                yield batch.to_pylist()
    else:
        loaded = _load_dataset(source.path)
        for start in range(0, len(loaded), _ROWS_PER_CALL):
            yield list(loaded.select(range(start, min(start + _ROWS_PER_CALL, len(loaded)))))


def _read_txt(path: Path, text_key: str) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"`data`: {path} is not UTF-8 at byte {error.start}\n  Convert it, or leave it out."
        ) from None


def _read_jsonl(path: Path, text_key: str) -> Iterator[str]:
    for where, record in _jsonl_records(path):
        yield _text_of(record, text_key, where)


def _jsonl_records(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:  # the latter for brackets nested too deep
                raise ConfigError(
                    f"`data`: {where} is no JSON object: {error}\n  A .jsonl file has one object per line."
                ) from None


def _text_of(record: Any, text_key: str, where: str) -> str:
    if not isinstance(record, dict):
        raise ConfigError(
            f"`data`: {where} is a {type(record).__name__}, not an object\n"
            f'  Each record looks like {{"{text_key}": "..."}}.'
        )
    if text_key not in record:
        raise _no_such_field(where, text_key, list(record))
    text = record[text_key]
    if not isinstance(text, str):
        raise ConfigError(
            f"`data`: {where}: `{text_key}` holds a {type(text).__name__}, not a string\n"
            "  Name the field that holds text with `text_key`."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"`data`: {where}: `{text_key}` holds {text[error.start]!r} at character {error.start}, "
            "half of a surrogate pair and no character\n  Write the whole character, or leave the record out."
        ) from None
    return text


def _no_such_field(where: str, text_key: str, names: list[str]) -> ConfigError:
    near = difflib.get_close_matches(text_key, names, n=1)
    hint = f"Did you mean `text_key: {near[0]}`?" if near else "Name one of these with `text_key`."
    return ConfigError(
        f"`data`: {where} has no field `{text_key}`; it has {', '.join(names) or 'none'}\n  {hint}"
    )


def _open_parquet(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(f"`data`: {path} is no Parquet file: {error}\n  Write it again.") from None


def _read_parquet(path: Path, text_key: str) -> Iterator[str]:
    with _open_parquet(path) as file:
        if text_key not in file.schema_arrow.names:
            raise _no_such_field(str(path), text_key, file.schema_arrow.names)
        for batch in file.iter_batches(columns=[text_key]):
            yield from _texts_of_column(batch.column(0).to_pylist(), text_key, str(path))


def _texts_of_column(values: list[Any], text_key: str, where: str) -> Iterator[str]:
    for value in values:
        if value is None:
            continue
        if not isinstance(value, str):
            raise ConfigError(
                f"`data`: {where}: `{text_key}` holds a {type(value).__name__}, not a string\n"
                "  Name the field that holds text with `text_key`."
            )
        yield value


def _load_dataset(path: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises whatever its reader met
        raise ConfigError(
            f"`data`: {path} cannot be loaded as a saved dataset: {error}\n  Save it again."
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded and len(loaded) != 1:
            raise ConfigError(
                f"`data`: {path} has the splits {', '.join(map(str, loaded))} and none is called train\n"
                "  Give the folder of one split."
            )
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    return loaded


def _read_dataset(path: Path, text_key: str) -> Iterator[str]:
    loaded = _load_dataset(path)
    if text_key not in loaded.column_names:
        raise _no_such_field(str(path), text_key, loaded.column_names)
    for batch in loaded.select_columns([text_key]).iter(batch_size=_ROWS_PER_CALL):
        yield from _texts_of_column(batch[text_key], text_key, str(path))


def check_not_empty(sources: list[Source], text_key: str) -> None:
    """Check that at least one document has text, reading no further than the first.

    Raises:
        ConfigError: every source is empty, or the first record met is malformed.
    """
    for source in sources:
        if next(read_documents(source, text_key), None) is not None:
            return
    names = ", ".join(str(source.path) for source in sources[:3]) + (", ..." if len(sources) > 3 else "")
    raise ConfigError(f"`data`: there is no text in {names}\n  Give files that hold text.")
