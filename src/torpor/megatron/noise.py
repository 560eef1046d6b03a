"""Keeps the notices of the libraries below Torpor off the screen, unless they are asked for.

Megatron-Core, Model-Optimizer and PyTorch's collectives warn about how they are called: deprecated modules,
fallbacks for kernels that are not installed, defaults that were filled in. The calls are Torpor's, so whoever
runs Torpor cannot act on them. Their errors are shown, and so is everything of Torpor's own.
`TORPOR_UPSTREAM_NOTICES=1` shows all.
"""

import logging
import os
import warnings
from typing import Final

_WARNING_MODULES: Final = (
    r"megatron\.",
    r"modelopt\.",
    r"torch\.distributed\.",  # Megatron-Core calls collectives by names that newer PyTorch has renamed
)
# Warnings of the compiler name a file instead, on the first import of a package installed without bytecode.
_SOURCE_FILES: Final = r".*[/\\](megatron|modelopt)[/\\]"
_LOGGERS: Final = (
    "megatron",
    "modelopt",
    "torch.utils.cpp_extension",  # looks for a CUDA toolkit when Megatron-Core imports it
)


def silence_upstream_notices() -> None:
    """Hide warnings from the modules above, and log records below ERROR; calling it again changes nothing.

    A logger whose level the application has set keeps it.
    """
    if os.environ.get("TORPOR_UPSTREAM_NOTICES") == "1":
        return
    for module in _WARNING_MODULES:
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=_SOURCE_FILES)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)
