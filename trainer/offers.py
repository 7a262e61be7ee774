"""The agent's check of the checkpoints that a node offers, for the controller."""

from trainer.agent.checkpoints.offers import folder_name, problem

__all__ = ["folder_name", "problem"]
