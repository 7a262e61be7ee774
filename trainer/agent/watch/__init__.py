"""Watches a run: its phase, how long it has been silent, and which rank blocks the others, with stacks."""
