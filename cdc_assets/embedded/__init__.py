"""A throw-away Postgres and a demo workload, for the demo, development and tests."""
