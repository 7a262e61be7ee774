"""What a release on a node is, and what brings it there."""
