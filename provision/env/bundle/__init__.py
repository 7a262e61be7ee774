"""The bundle: its format, and how it is read and checked."""
