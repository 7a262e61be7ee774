"""The agents' link: one connection of every node's agent to rank 0's, messages, meetings, and copies of checkpoints."""
