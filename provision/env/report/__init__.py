"""What bundles hold, and how two of them differ, in the words of people."""
