"""Dagster resources: Spark over Connect, and the flusher that a sensor supervises."""
