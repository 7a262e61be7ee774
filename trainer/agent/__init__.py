"""The run agent: a folder of stdlib-only modules that is sent with a run and started as ``python -I <folder>``."""
