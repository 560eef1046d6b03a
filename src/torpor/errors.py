"""The errors Torpor raises on purpose: one base class, a handful of children."""


class TorporError(Exception):
    """Base class of every error that Torpor raises on purpose.

    Attributes:
        is_on_every_rank: Whether every rank of the job raises this very error, so that one can tell it.
    """

    is_on_every_rank = False


class ConfigError(TorporError, ValueError):
    """A configuration file, option or argument that cannot be honoured."""


class CheckpointError(TorporError, ValueError):
    """A checkpoint folder that is damaged, incomplete or contradicts itself."""


class UnsupportedModelError(TorporError, ValueError):
    """A model, layout or state that dormancy cannot honour."""


class MTPExecutedError(TorporError):
    """A dormant MTP module ran outside inference."""


class MTPChangedError(TorporError):
    """A retained MTP tensor differs from what it was when it was put to sleep."""


class MTPTrainedError(TorporError):
    """A retained MTP parameter has a gradient, a DDP buffer or optimizer state."""
