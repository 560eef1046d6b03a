"""Whole runs: from a configuration to results on disk."""
