"""The leaderless log: its schema, and the one class that reads and writes it."""
