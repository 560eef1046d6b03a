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
    from torpor.dormancy import pre_wrap_hook as pre_wrap_hook

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
    "pre_wrap_hook",
]


def __getattr__(name: str) -> Any:
    if name in ("freeze_mtp", "pre_wrap_hook"):
        from torpor import dormancy

        return getattr(dormancy, name)
    raise AttributeError(f"module 'torpor' has no attribute {name!r}")
