"""Data sets, models and code on their way to the nodes: what is sent of a folder, and what a node has of it already."""
