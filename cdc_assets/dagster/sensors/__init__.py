"""Sensors: each tick looks at what is, asks for what is missing, and says what it saw.

A tick takes less than 2 seconds and is never the consumer of anything. Resources are rebuilt at
every tick and code servers overlap, so what must outlive a tick is a module's global, and what must
be exclusive is decided by Postgres.
"""
