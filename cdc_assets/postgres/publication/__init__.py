"""Publications: what one has and sends, whether Postgres then accepts changes, and changing it."""
