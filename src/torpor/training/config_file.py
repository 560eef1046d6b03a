"""Reading a configuration: from a YAML file to checked settings, each mistake answered with its place."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from torpor.errors import ConfigError
from torpor.training.config import RunConfig


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; this loader refuses them.

    It also says where a value stands that PyYAML recognizes by its looks and then cannot convert.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # the date 2026-13-45 is a ValueError, `!!bool x` a KeyError
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value!r} cannot be read: {error}", node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value if node.id == "mapping" else ():  # `!!map [a]` is refused below
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"a key is a {key_node.id}, not a word", key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key_node.value}` appears twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_config[Config: RunConfig](
    kind: type[Config], path: Path, overrides: Mapping[str, Any] | None = None
) -> Config:
    """Read and check the configuration of a training command.

    Args:
        kind: which command's settings the file holds.
        path: YAML file; the relative paths inside it are relative to its own folder.
        overrides: settings that replace the file's, by name; None values are ignored, and their relative
            paths are relative to the working directory.

    Returns:
        The checked configuration, with absolute paths.

    Raises:
        ConfigError: the file is missing or no YAML mapping, a key is unknown, or a value cannot be honoured.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file\n"
            f"  Give the path of a YAML file; see `torpor {kind.command} --help`."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}\n  Give a readable UTF-8 YAML file.") from None
    try:
        values = yaml.load(text, _UniqueKeyLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"{path}{where}: {problem}\n  A configuration is a YAML mapping with one `key: value` per line."
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{path}: its brackets are nested too deep to read\n"
            "  A configuration is a YAML mapping with one `key: value` per line."
        ) from None
    if not isinstance(values, dict):
        found = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"{path}: holds {found}, not a mapping\n  Write one `key: value` per line.")
    for name, value in (overrides or {}).items():
        if value is not None:
            values[name] = value.absolute() if isinstance(value, Path) else value
    try:
        return kind.model_validate(values, context={"base": path.absolute().parent})
    except ValidationError as error:
        raise ConfigError(_explain(kind, path, error)) from None


def _explain(kind: type[RunConfig], path: Path, error: ValidationError) -> str:
    """One line per problem, each with the file, the key, its value and what it should be."""
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        value = problem["input"]
        if problem["type"] == "extra_forbidden":
            known = list(_settings_like(kind, problem["loc"]))
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"the settings are: {', '.join(known)}"
            lines.append(f"{path}: `{key}` (with the value {value!r}) is not a setting\n  {hint}")
        elif problem["type"] == "missing":
            purpose = _settings_like(kind, problem["loc"])[key]
            lines.append(f"{path}: `{key}` is missing\n  Add `{key}: ...` ({purpose}).")
        elif not key:
            lines.append(f"{path}: {_plain(problem['msg'])}\n  Change one of them.")
        else:
            lines.append(f"{path}: `{key}` is {value!r}: {_plain(problem['msg'])}\n  Change its value.")
    return "\n".join(lines)


def _settings_like(kind: type[RunConfig], loc: tuple[int | str, ...]) -> dict[str, str | None]:
    """The settings that may stand where `loc` is, with what they are: those of a block within a block."""
    fields, prefix = kind.model_fields, ""
    for part in loc[:-1]:
        # A block is a model of its own or None.
        blocks = [t for t in get_args(fields[str(part)].annotation) if hasattr(t, "model_fields")]
        fields, prefix = blocks[0].model_fields, f"{prefix}{part}."
    return {f"{prefix}{name}": field.description for name, field in fields.items()}


def _plain(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
