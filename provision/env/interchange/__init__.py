"""Archives of conda-pack: made from a bundle, and made into one."""
