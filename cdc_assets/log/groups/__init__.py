"""Consumer groups beside the lake's: how far each is in each table's log, and what it holds."""
