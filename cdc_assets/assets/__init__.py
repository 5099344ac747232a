"""The four assets of a replicated table: source, snapshot, staged log and lake table."""
