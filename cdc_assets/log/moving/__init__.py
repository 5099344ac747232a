"""A source's log moves to another database: the mark of it, and the rows."""
