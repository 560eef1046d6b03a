"""Putting MTP layers to sleep and proving that they stayed asleep."""

from torpor.dormancy.handle import DormancyReport, DormantMTP, freeze_mtp
from torpor.dormancy.hook import PreWrapHook, pre_wrap_hook

__all__ = ["DormancyReport", "DormantMTP", "PreWrapHook", "freeze_mtp", "pre_wrap_hook"]
