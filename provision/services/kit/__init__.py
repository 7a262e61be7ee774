"""What services share: kinds of change, plans, and the scripts that nodes run."""
