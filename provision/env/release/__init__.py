"""Releases on a node, and how they get there."""
