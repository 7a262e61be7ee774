"""Which checkpoints a node has, whether they are whole, and which is the newest that all nodes have together."""
