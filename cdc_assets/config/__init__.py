"""What a source's YAML may say, and what follows from it."""
