"""Fields of config.json: where they are, and believed only after they have been checked."""

from collections.abc import Mapping
from typing import Any

from torpor.errors import CheckpointError

Config = Mapping[str, Any]

# Far above any model; keeps a damaged configuration from spelling out names without end.
MAX_COUNT = 2**24
MAX_LAYERS = 2**12
MAX_MTP_LAYERS = 2**6

# Where a model that is more than a language model keeps the language model's configuration.
NESTED = ("text_config", "thinker_config", "llm_config", "language_config")


def text_config(config: Config) -> Config:
    """Return the language model's part of a configuration: a nested one, or all of it.

    Args:
        config: What config.json says.
    """
    for field in NESTED:
        nested = config.get(field)
        if isinstance(nested, dict):
            return text_config(nested)
    return config


def read_count(
    config: Config, field: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_COUNT
) -> int:
    """Return a field that has to be a whole number.

    Args:
        config: What config.json says.
        field: Its name.
        default: What an absent or null field means; None where it has to be there.
        minimum: The smallest value that makes sense.
        maximum: The largest.

    Raises:
        CheckpointError: It is anything else.
    """
    value = config.get(field)
    if value is None:
        value = default
    # `type` and not isinstance: True is an int to Python.
    if type(value) is not int or not minimum <= value <= maximum:
        raise CheckpointError(
            f"config.json has {field} {value!r}, needs a whole number from {minimum} to {maximum}"
        )
    return value
