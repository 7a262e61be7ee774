"""Samples of what a run uses of its node: GPUs, memory, network, processors."""
