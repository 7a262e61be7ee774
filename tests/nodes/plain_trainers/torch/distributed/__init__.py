"""Replaces torch in tests of the agent: it is sent with the run and hides nothing but torchrun."""
