"""Samples of the resources that a run uses on its node: GPUs, memory, network, processors."""
