"""Measures the network between nodes: a folder of modules that travels to every node, ``python -I <folder>``.

It needs torch and nothing else. ``__main__`` starts a process for each rank of its node, which ``measure`` is.
"""
