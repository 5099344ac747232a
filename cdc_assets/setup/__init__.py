"""From an address to a source: its database's tables, the YAML, the administrator's SQL."""
