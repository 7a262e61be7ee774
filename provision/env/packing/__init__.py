"""An environment becomes a bundle, in one pass."""
