"""Tables to tables with intervals. No torch here: every number comes from files on disk."""
