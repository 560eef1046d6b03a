"""Post-train language models with their multi-token-prediction (MTP) layers asleep.

Importing this package patches nothing and imports neither torch nor Megatron-Core: names that need
them are resolved on first use.
"""

from typing import TYPE_CHECKING, Any

from torpor.errors import (
    CheckpointError,
    ConfigError,
    MTPChangedError,
    MTPExecutedError,
    MTPTrainedError,
    TorporError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from torpor.dormancy import freeze_mtp as freeze_mtp

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "MTPChangedError",
    "MTPExecutedError",
    "MTPTrainedError",
    "TorporError",
    "UnsupportedModelError",
    "freeze_mtp",
]


def __getattr__(name: str) -> Any:
    if name == "freeze_mtp":
        from torpor.dormancy import freeze_mtp

        return freeze_mtp
    raise AttributeError(f"module 'torpor' has no attribute {name!r}")
