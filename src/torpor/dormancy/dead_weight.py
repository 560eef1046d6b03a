"""The output weight that a tied last stage with MTP allocates but never uses: out of the way, and back.

With tied embeddings and PP>1 the stage that holds both MTP and the loss projects with its embedding
duplicate, and still allocates an `output_layer.weight` (models/gpt/gpt_model.py and
models/hybrid/hybrid_model.py: `skip_weight_param_allocation` looks at `pre_process` only). It is random,
never synchronised and never read; LanguageModule.sharded_state_dict refuses to save beside it, and with
`overlap_grad_reduce` DDP waits for its gradient for ever. While MTP sleeps the parameter is taken off the
layer; the model's `state_dict` and `load_state_dict` go on carrying the tensor, so that their keys stay.
"""

import functools
from typing import Any

import torch


class DeadOutputWeight:
    """Holds the dead output weight of one language model while it is off the model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.weight: torch.nn.Parameter = model.output_layer.weight
        self.model.output_layer.weight = None
        self._hooks = [
            # torch marks the hook with an attribute, which a bound method cannot take.
            model.register_state_dict_post_hook(functools.partial(self._add_to_state)),
            model.register_load_state_dict_pre_hook(self._take_from_state),
        ]

    @staticmethod
    def is_in(model: Any) -> bool:
        """Whether this rank's stage of the model has an output weight that nothing reads."""
        if not (model.share_embeddings_and_output_weights and model.mtp_process) or model.pre_process:
            return False
        return getattr(getattr(model, "output_layer", None), "weight", None) is not None

    def put_back(self) -> None:
        """Give the parameter back to the output layer."""
        for hook in self._hooks:
            hook.remove()
        self.model.output_layer.weight = self.weight

    def _add_to_state(self, module: Any, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        state[f"{prefix}output_layer.weight"] = self.weight.detach()

    def _take_from_state(self, module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        loaded = state.pop(f"{prefix}output_layer.weight", None)
        if loaded is not None:
            self.weight.data.copy_(loaded)
