"""Spark over Connect: the server that we supervise, its jars, and sessions."""
