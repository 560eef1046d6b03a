"""A forward that ends before the output projection: the final hidden states, and the weight to project with.

A loss or a log-probability that is computed from hidden states in chunks never needs all logits
[s, b, v] at once. Megatron-Core's GPTModel has an argument for that (`output_processor`), HybridModel has
none, and wrappers hide the model behind other arguments; so the output layer itself hands over what it is
given. What it is given is what counts: with tied embeddings the model passes the embedding's weight, which
on a last stage with MTP layers is another tensor than `output_layer.weight`.

Only the main call is handed over. MTP layers that are awake project before it, once for each depth
(multi_token_prediction.py, process_mtp_loss), and go on to their own loss as ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from torpor.errors import TorporError, UnsupportedModelError


@dataclass(frozen=True)
class OutputProjection:
    """What makes the logits of a language model: `logits = hidden_states @ weight.T`.

    Attributes:
        hidden_states_SBH: Final hidden states [s, b, h]; [s / tp, b, h] with `is_sequence_parallel`.
        weight_VH: This rank's rows of the output weight [v / tp, h].
        tp_group: Ranks that the vocabulary is divided over in order; None if the weight is whole.
        is_sequence_parallel: Whether the sequence is divided over the same ranks too.
        vocab_size: Rows of the whole weight that stand for a token, None for all. Megatron appends rows
            until the vocabulary divides over the ranks; those have no part in any distribution.
    """

    hidden_states_SBH: torch.Tensor
    weight_VH: torch.Tensor
    tp_group: torch.distributed.ProcessGroup | None = None
    is_sequence_parallel: bool = False
    vocab_size: int | None = None


class Handover:
    """Where the output layer leaves what it did not project."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._project: Any = model.output_layer.forward if model.post_process else None
        self._projection: OutputProjection | None = None
        self._num_calls = 0
        self._num_mtp_calls = 0

    @property
    def is_made(self) -> bool:
        """Whether the main call of this forward has been reached."""
        return self._projection is not None

    def take(self) -> OutputProjection | None:
        """Return what was handed over, once, and forget it; None on a stage without output layer.

        Raises:
            TorporError: If the block has run no forward, or this was taken before.
        """
        if not self._model.post_process:
            return None
        if self._projection is None:
            raise TorporError(
                f"{type(self._model).__name__} handed over no hidden states: its output layer was called"
                f" {self._num_calls} times for MTP layers and not for the main prediction\n"
                "  Run exactly one forward in the block, and take its result once."
            )
        projection, self._projection = self._projection, None
        return projection

    def receive(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stand in for the forward of the output layer, a ColumnParallelLinear.

        Args:
            input_: Hidden states [s, b, h], or [s / tp, b, h].
            weight: The weight to project with, None for the layer's own.
            runtime_gather_output: Whether logits should be whole on every rank.

        Returns:
            Logits [s, b, v / tp] of an MTP layer; the hidden states themselves of the main prediction.

        Raises:
            TorporError: On a second forward in the block.
        """
        if self.is_made:
            raise TorporError(
                "the model was called twice in one block that hands over hidden states\n"
                "  Take the first result before the second forward, each in a block of its own."
            )
        layer = self._model.output_layer
        if self._num_calls == 0:
            self._num_mtp_calls = _mtp_projections(self._model)
        self._num_calls += 1
        if self._num_calls <= self._num_mtp_calls:
            logits, bias = self._project(input_, weight=weight, runtime_gather_output=runtime_gather_output)
            return logits, bias
        self._projection = OutputProjection(
            # MuP multiplies logits by a constant: the same as multiplying hidden states.
            self._model._scale_logits(input_),
            layer.weight if weight is None else weight,
            tp_group=layer.tp_group,
            is_sequence_parallel=layer.sequence_parallel,
        )
        return input_, None


@contextmanager
def hand_over_projection(model: torch.nn.Module) -> Iterator[Handover]:
    """Have one forward of a model end with its final hidden states instead of logits.

    with hand_over_projection(model) as handover:
        model(tokens, positions, None, labels=labels)
    projection = handover.take()

    The model may be wrapped, in DDP or Float16Module for instance; it is called as ever, wrappers included.
    On the last stage it then returns hidden states in place of logits or losses, which are not to be used:
    take them from the handover, where they have kept their type. The gradient of MoE balancing and of MTP
    layers that are awake is in them. Only such layers look at labels. On other stages nothing is different.
    At the end of the block the model is as before, whatever was raised in it.

    Args:
        model: A GPTModel or HybridModel, this rank's chunk of it, wrapped or not.

    Yields:
        The handover, to be taken after the forward.

    Raises:
        UnsupportedModelError: If the model is of another kind, or its output layer does more than to
            multiply: a bias, enabled quantizers, weights that are sharded between forwards.
    """
    language_model = find_language_model(model)
    handover = Handover(language_model)
    if not language_model.post_process:
        yield handover
        return
    check_output_layer(language_model)
    loss = language_model.compute_language_model_loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compute_language_model_loss(labels_BS: torch.Tensor, logits_SBV: torch.Tensor) -> torch.Tensor:
        return logits_SBV if handover.is_made else loss(labels_BS, logits_SBV)

    with (
        # The layer's forward and not its call: hooks on the layer still run, DDP's that wait for weights too.
        set_within(language_model.output_layer, "forward", torch.compiler.disable(handover.receive)),
        set_within(language_model, "compute_language_model_loss", compute_language_model_loss),
    ):
        yield handover


def find_language_model(model: torch.nn.Module) -> Any:
    """Return the GPTModel or HybridModel inside wrappers that keep theirs in `module`.

    Raises:
        UnsupportedModelError: If there is none, or a wrapper shards weights between forwards.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    while not isinstance(model, GPTModel | HybridModel):
        inner = getattr(model, "module", None)
        if isinstance(model, _BaseDataParallel) and not isinstance(model, DistributedDataParallel):
            raise UnsupportedModelError(
                f"{type(model).__name__} shards the output weight as soon as the output layer has run, and"
                " the loss is computed after that\n"
                "  Wrap the model in Megatron-Core's DistributedDataParallel."
            )
        if not isinstance(inner, torch.nn.Module):
            raise UnsupportedModelError(
                f"{type(model).__name__} is no GPTModel or HybridModel and no wrapper of one\n"
                "  Hidden states can be taken from Megatron-Core's two language models."
            )
        model = inner
    return model


def _mtp_projections(model: Any) -> int:
    """How often MTP layers call the output layer in the running forward, which has begun already."""
    from megatron.core.inference.utils import InferenceMode
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    # While dormant the model reads this through a copy of its config that says None.
    num_layers = model.config.mtp_num_layers or 0
    if InferenceMode.is_active() or (isinstance(model, HybridModel) and not model.mtp_process):
        return 0
    return int(num_layers)


def check_output_layer(model: torch.nn.Module) -> None:
    """Check that a model's logits are its hidden states times a weight, as far as this stage can tell.

    Args:
        model: A GPTModel or HybridModel, wrapped or not.

    Raises:
        UnsupportedModelError: The output layer does more than to multiply.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear

    language_model = find_language_model(model)
    if not language_model.post_process:
        return
    layer = language_model.output_layer
    if not isinstance(layer, ColumnParallelLinear):
        raise UnsupportedModelError(
            f"the output layer is a {type(layer).__name__}, not Megatron-Core's ColumnParallelLinear: it may"
            " do more than to multiply hidden states by a weight\n  Leave adapters off the output layer."
        )
    if layer.bias is not None:
        raise UnsupportedModelError(
            "the output layer has a bias, which the loss from hidden states does not know\n"
            "  Build the model without it."
        )
    enabled = [name for name, child in layer.named_children() if getattr(child, "is_enabled", False)]
    if enabled:
        raise UnsupportedModelError(
            f"the output layer is quantized ({', '.join(enabled)}), and the loss multiplies by its plain"
            ' weight\n  Leave the output layer out of quantization: {"*output_layer*": {"enable": False}}.'
        )


@contextmanager
def set_within(module: torch.nn.Module | ModuleType, name: str, value: Any) -> Iterator[None]:
    """Set an attribute on the object itself and put back what stood on it before, if anything did."""
    attributes = vars(module)
    was_set, previous = name in attributes, attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if was_set:
            attributes[name] = previous
        else:
            del attributes[name]
