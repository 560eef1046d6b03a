"""Putting MTP layers to sleep and proving that they stayed asleep."""

from torpor.dormancy.handle import DormancyReport, DormantMTP, freeze_mtp

__all__ = ["DormancyReport", "DormantMTP", "freeze_mtp"]
