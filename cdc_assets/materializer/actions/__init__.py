"""What a merge does to a lake table: one action a file, each one commit."""
