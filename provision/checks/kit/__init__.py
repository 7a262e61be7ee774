"""What tasks and inventories use of the checks: which to run, their probes as one script, the lines of measures."""
