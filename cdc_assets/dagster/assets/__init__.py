"""The assets of a table: source, snapshot, staged log and lake table; health and maintenance."""
