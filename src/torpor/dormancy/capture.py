"""Captures on the output layer that count MTP's calls of it: with MTP asleep they would miss the main one."""

from typing import Any

from torpor.errors import UnsupportedModelError


def refuse_counting_captures(model: Any, name: str) -> None:
    """Refuse forward hooks on a model's output layer that skip as many calls as there are MTP layers.

    Such a hook takes the first calls of a forward for MTP's and the one after them for the main one
    (Megatron-LM, megatron/training/distillation/logits_saver.py). Asleep, MTP makes no call, and the hook
    would drop main logits without a word. They are recognised by a non-zero count on the hook's owner whose
    name speaks of MTP.

    Args:
        model: The language model; a pipeline stage without an output layer has nothing to refuse.
        name: What to call it in the message.

    Raises:
        UnsupportedModelError: naming the hook and its count.
    """
    output_layer = getattr(model, "output_layer", None)
    if output_layer is None or not output_layer._forward_hooks:
        return
    for hook in output_layer._forward_hooks.values():
        owner = getattr(hook, "__self__", hook)
        for attribute, value in getattr(owner, "__dict__", {}).items():
            if "mtp_num" in attribute and isinstance(value, int) and value > 0:
                raise UnsupportedModelError(
                    f"{name or type(model).__name__}.output_layer has the forward hook"
                    f" {getattr(hook, '__qualname__', type(hook).__qualname__)}, which waits for"
                    f" {attribute}={value} calls of MTP before each main one: asleep, MTP makes none\n"
                    f"  Set {attribute} of {type(owner).__name__} to 0, or remove the hook."
                )
