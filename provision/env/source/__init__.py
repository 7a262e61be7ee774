"""The files of an environment on the machine that packs it."""
