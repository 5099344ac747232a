"""Everything that Dagster loads; nothing else imports it."""
