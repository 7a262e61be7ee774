"""What a node says about itself before a run: its facts, its files, and who else is at work on it."""
