"""Owns a run on one node: the guard, the supervisor and its attempts."""
