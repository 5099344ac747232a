"""One consistent point: tables enrolled and published, a snapshot pinned, and its rows read."""
