"""Everything that speaks Postgres: catalog, CTID ranges, LSNs, pins, replication, types."""
