"""The training loop and what feeds it: configuration, data, schedules, losses, progress."""
