"""HybridModel with the argument `compute_mtp_loss`: the installed one where it has it, a stand-in elsewhere.

No released wheel has the argument yet. The stand-in keeps its contract: False skips MTP layers and their loss
outside inference and nothing else; what speculative decoding saves does not depend on it.
"""

import inspect
from typing import Any


def hybrid_model_with_argument() -> type[Any]:
    """Return a subclass of HybridModel whose forward takes the argument; `class.given` lists what it got."""
    from megatron.core.inference.utils import InferenceMode
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    class Recording(HybridModel):
        given: list[bool] = []  # noqa: RUF012

        def forward(self, *args: Any, compute_mtp_loss: bool = True, **kwargs: Any) -> Any:
            self.given.append(compute_mtp_loss)
            return super().forward(*args, compute_mtp_loss=compute_mtp_loss, **kwargs)

    if "compute_mtp_loss" in inspect.signature(HybridModel.forward).parameters:
        return Recording

    class StandIn(HybridModel):
        given: list[bool] = []  # noqa: RUF012

        def forward(self, *args: Any, compute_mtp_loss: bool = True, **kwargs: Any) -> Any:
            self.given.append(compute_mtp_loss)
            if compute_mtp_loss or InferenceMode.is_active():
                return super().forward(*args, **kwargs)
            has_mtp, self.mtp_process = self.mtp_process, False
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.mtp_process = has_mtp

        def shared_embedding_or_output_weight(self) -> Any:
            # Which weight a tied stage projects with is no matter of the argument.
            skips, self.mtp_process = self.mtp_process, hasattr(self, "mtp")
            try:
                return super().shared_embedding_or_output_weight()
            finally:
                self.mtp_process = skips

    return StandIn
