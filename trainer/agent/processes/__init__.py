"""The run's processes: which there are, which of them are ranks, and how all of them are ended."""
