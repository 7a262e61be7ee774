"""The life of a run on a node: the guard, the supervisor and its attempts, what they hear, and how they judge."""
