"""Keeps Megatron-Core's notices that no user can act on off the screen."""

import logging
import re
import warnings
from typing import Final

# (message pattern, module that warns). Each names a fallback that Torpor chose on purpose, or an upstream
# call site that a user of Torpor does not write. Anything not listed here is shown.
_WARNINGS: Final = (
    # megatron/core/models/backends.py, models/gpt/gpt_layer_specs.py, transformer/transformer_block.py
    (r"Apex is not installed", r"megatron\.core\."),
    # megatron/core/optimizer/{__init__,optimizer,clip_grads}.py, distributed/fsdp/src/megatron_fsdp/*.py
    (r"Transformer Engine and Apex are not installed", r"megatron\.core\."),
)

# (logger, message pattern).
_LOG_RECORDS: Final = (
    # megatron/core imports torch's extension builder, which looks for a CUDA toolkit.
    ("torch.utils.cpp_extension", r"No CUDA runtime is found"),
)


class _DropMatching(logging.Filter):
    """A logging filter that drops the records whose message matches one of its patterns."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self.patterns = tuple(re.compile(pattern) for pattern in patterns)

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether the record is to be shown."""
        message = record.getMessage()
        return not any(pattern.search(message) for pattern in self.patterns)


def silence_upstream_notices() -> None:
    """Hide the listed notices of Megatron-Core and PyTorch; calling it again changes nothing."""
    for message, module in _WARNINGS:
        warnings.filterwarnings("ignore", message=message, module=module)
    for name in {name for name, _ in _LOG_RECORDS}:
        logger = logging.getLogger(name)
        if not any(isinstance(existing, _DropMatching) for existing in logger.filters):
            logger.addFilter(_DropMatching(tuple(text for owner, text in _LOG_RECORDS if owner == name)))
