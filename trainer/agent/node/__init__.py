"""The facts of a node before a run: its hardware, network, files and running runs."""
