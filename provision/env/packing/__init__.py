"""Pack an environment into a bundle."""
