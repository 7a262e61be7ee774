"""What ``__main__`` can be asked for: start, follow and stop a run."""
