"""The mean of MoE metrics over the layers that ran.

Megatron's training loops report auxiliary losses as a mean over all MoE layers, `mtp_num_layers` of them
included (transformer/moe/moe_logging.py); with sleeping MTP layers the mean is too small by their share. The
field cannot be left out of the report either: the metric tensors are sized by it on every pipeline rank.
"""

from typing import Any


class CountLayersThatRan:
    """Stands in for the `_count_moe_layers` of Megatron's metrics tracker while MTP layers sleep.

    The tracker is one a process, so the count holds for all models in it.
    """

    def __init__(self) -> None:
        self.num_handles = 0

    def __call__(self, num_layers: int | None, moe_layer_freq: Any, mtp_num_layers: int | None) -> int:
        """Count the MoE layers without those of MTP."""
        from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

        count: int = MoEMetricsTracker._count_moe_layers(num_layers, moe_layer_freq, None)
        return count

    @classmethod
    def install(cls) -> None:
        """Count without MTP from now on, until as many calls of `uninstall`."""
        attributes = _tracker_attributes()
        attributes.setdefault("_count_moe_layers", cls()).num_handles += 1

    @classmethod
    def uninstall(cls) -> None:
        """Take back one `install`."""
        attributes = _tracker_attributes()
        installed = attributes.get("_count_moe_layers")
        # None where the tracker was replaced meanwhile: the new one counts as upstream does.
        if installed is not None:
            installed.num_handles -= 1
            if installed.num_handles == 0:
                del attributes["_count_moe_layers"]


def _tracker_attributes() -> dict[str, Any]:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    attributes: dict[str, Any] = vars(get_moe_metrics_tracker())
    return attributes
