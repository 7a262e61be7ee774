"""Measures the network between nodes. The folder is copied to every node and run with ``python -I <folder>``.

It needs only torch. ``__main__`` starts a process for each rank of its node, which runs ``measure``.
"""
