"""Asset checks of every lake table, and of the source."""
