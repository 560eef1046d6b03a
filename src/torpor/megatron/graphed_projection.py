"""A forward without autograd, up to the output projection, replayed from a CUDA graph.

The host needs longer to launch the kernels of a small layer than a fast GPU to run them, and a teacher has
the same shapes and weights in every step: its launches are recorded once and replayed as one.

Source: CUDA graphs as PyTorch has them (torch.cuda.graph). A replay runs no Python: hooks within the model
run while it is recorded and not afterwards.
"""

from typing import Any

import torch

from torpor.megatron.hidden_states import (
    OutputProjection,
    find_language_model,
    hand_over_projection,
    set_within,
)

# Libraries choose their kernels, compile and allocate in the first ones.
_EAGER_RUNS = 2


class GraphedProjection:
    """Runs a frozen model and returns what its logits would be made of.

    The first runs are ordinary ones. Inputs of another shape than the first ones stay with them, and so does
    a model whose forward does what a recording cannot, such as to wait for the device.

    Args:
        model: A model that `can_be_recorded`. Its weights are not to move.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._is_refused = False
        self._shape: torch.Size | None = None
        self._num_runs = 0
        self._graph: Any = None
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._result: OutputProjection | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether runs are replays."""
        return self._graph is not None

    @torch.no_grad()
    def run(
        self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, labels_BS: torch.Tensor
    ) -> OutputProjection:
        """Run the model in evaluation mode.

        Args:
            tokens_BS: Token ids int64 [b, s].
            positions_BS: Positions int64 [b, s].
            labels_BS: Next tokens int64 [b, s], for MTP layers that are awake.

        Returns:
            The projection. Its hidden states are overwritten by the next run.
        """
        inputs = (tokens_BS, positions_BS, labels_BS)
        self._shape = self._shape or tokens_BS.shape
        if self._is_refused or tokens_BS.shape != self._shape:
            return self._run(*inputs)
        if self._graph is None:
            self._num_runs += 1
            if self._num_runs < _EAGER_RUNS:
                return self._run(*inputs)
            if self._num_runs == _EAGER_RUNS:
                return self._run_watched(*inputs)
            self._record(inputs)
        for ours, given in zip(self._inputs, inputs, strict=True):
            ours.copy_(given)
        self._graph.replay()
        assert self._result is not None
        return self._result

    def _run_watched(self, *inputs: torch.Tensor) -> OutputProjection:
        """Find out whether the forward can be recorded: a broken recording would leave generators unusable.

        It cannot wait for the device, nor read the state of a generator as Megatron's attention does for
        dropout, in evaluation too (transformer/dot_product_attention.py).
        """
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with set_within(torch.cuda.random, "get_rng_state", _refuse):
                return self._run(*inputs)
        except RuntimeError:  # of another kind, it comes again
            self._is_refused = True
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return self._run(*inputs)

    def _record(self, inputs: tuple[torch.Tensor, ...]) -> None:
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's for one, may go on asking for events.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._result = self._run(*self._inputs)
        self._graph = graph

    def _run(self, *inputs: torch.Tensor) -> OutputProjection:
        if self.model.training:
            self.model.eval()
        tokens_BS, positions_BS, labels_BS = inputs
        with hand_over_projection(self.model) as handover:
            self.model(tokens_BS, positions_BS, None, labels=labels_BS)
        projection = handover.take()
        assert projection is not None, "the model is whole on this rank"
        return projection


def _refuse(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("the state of a generator cannot be read while a CUDA graph is recorded")


def can_be_recorded(model: torch.nn.Module) -> bool:
    """Say whether a model's forward launches the same kernels every time, on this rank alone.

    Experts get another number of tokens each time and are waited for; what several ranks compute together
    they would have to record together; quantizers may still be calibrated.

    Args:
        model: A GPTModel or HybridModel.
    """
    from megatron.core import parallel_state

    config = find_language_model(model).config
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    )
    return (
        next(model.parameters()).is_cuda
        and sizes == (1, 1, 1)
        and not config.num_moe_experts
        and not any(getattr(module, "is_enabled", False) for module in model.modules())
    )
