"""From rows to durable staged files."""
