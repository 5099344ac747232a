"""A session of Postgres: how it is opened, by whichever driver, and what it waits for."""
