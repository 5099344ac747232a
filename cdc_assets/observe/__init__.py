"""How a source is and was, and who is told: status, conditions, notices, sinks, the report."""
