"""Finds the checkpoints of a node, checks that they are complete, and selects the newest one of all nodes."""
