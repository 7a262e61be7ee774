"""Keeps checkpoints safe: copies on other nodes (``keeper.py``), and a first place in RAM (``memory.py``)."""
