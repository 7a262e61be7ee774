"""The run agent: a folder of stdlib-only modules that travels with a run and is started as ``python -I <folder>``."""
