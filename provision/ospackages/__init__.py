"""Packages of operating systems for nodes without a network: solved on a connected machine, carried in one file."""
