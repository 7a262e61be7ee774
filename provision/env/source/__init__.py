"""What lies in an environment, before any of it is packed."""
