"""A throw-away Postgres, for the demo, development and tests."""
