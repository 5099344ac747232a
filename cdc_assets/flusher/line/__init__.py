"""The bytes of a replication connection without encryption."""
