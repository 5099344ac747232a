"""Spark: the Connect server, sessions, and the Iceberg tables."""
