"""Asset checks of every lake table: unique keys, and how far it is behind the source."""
