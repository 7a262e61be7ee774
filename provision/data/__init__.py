"""Copies data sets, models and code to the nodes: finds a folder's files that a node lacks, and sends them."""
