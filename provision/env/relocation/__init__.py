"""Rewrite an environment's files for another prefix."""
