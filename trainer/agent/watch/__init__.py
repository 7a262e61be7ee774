"""Watches a run: what it does, how long it has been silent, which rank keeps the others waiting, and where it is."""
