"""Describes the contents of bundles and the differences between two bundles as text."""
