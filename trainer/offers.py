"""The agent's check of what a node says about its checkpoints, for the controller."""

from trainer.agent.checkpoints.offers import folder_name, problem

__all__ = ["folder_name", "problem"]
