"""Preflight checks, one file each: ``provision/checks/<id>.py`` (dots of the id become underscores)."""
