"""The agent's commands that start, follow and stop a run."""
