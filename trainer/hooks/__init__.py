"""Modules that Python loads at the start of a run's processes. Copied to nodes, never imported here."""
