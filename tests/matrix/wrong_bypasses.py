"""Ways to skip MTP that look right and are not: the tests have to catch each.

With the first two the loss falls, the copies of a shared embedding stay equal and the cross-entropy is close.
With tied weights on several stages the last one projects with a random weight of its own all the same.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from torpor import freeze_mtp
from torpor.dormancy import bypass


def flip_mtp_process(chunks: Sequence[torch.nn.Module]) -> None:
    """Freeze, and turn `mtp_process` off in every forward, under a copy of the config without MTP layers."""

    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        kept = model.mtp_process, model.config
        model.mtp_process, model.config = False, copy.copy(model.config)
        model.config.mtp_num_layers = None
        try:
            return type(model).forward(model, *args, **kwargs)
        finally:
            model.mtp_process, model.config = kept

    _freeze_and_wrap(chunks, forward)


def edit_config_in_place(chunks: Sequence[torch.nn.Module]) -> None:
    """Freeze, and in every forward turn `mtp_process` off and take the layers out of the config itself."""

    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        kept = model.mtp_process, model.config.mtp_num_layers
        model.mtp_process, model.config.mtp_num_layers = False, None
        try:
            return type(model).forward(model, *args, **kwargs)
        finally:
            model.mtp_process, model.config.mtp_num_layers = kept

    _freeze_and_wrap(chunks, forward)


def _freeze_and_wrap(chunks: Sequence[torch.nn.Module], forward: Any) -> None:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(not name.startswith("mtp."))
        chunk.forward = partial(forward, chunk)


def freeze_without_zero_gradients(chunks: Sequence[torch.nn.Module]) -> Any:
    """Sleep as Torpor does, but leave embedding copies that nothing reads without a gradient."""
    handle = freeze_mtp(chunks)
    for chunk in chunks:
        vars(chunk)["_call_impl"].unread_duplicates = list
    return handle


def freeze_without_waiting_for_weights(chunks: Sequence[torch.nn.Module]) -> Any:
    """Sleep as Torpor does, but do not wait for the weights that overlap_param_gather fetches."""
    bypass._wait_for_gathered_weights = lambda module: None
    return freeze_mtp(chunks)
