"""Rewrite what names the old prefix. Pure: bytes in, bytes out."""
