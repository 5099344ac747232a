"""The leaderless log: the only SQL on the coordination schema, and staged files."""
