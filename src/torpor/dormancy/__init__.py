"""Putting MTP layers to sleep and proving that they stayed asleep."""
