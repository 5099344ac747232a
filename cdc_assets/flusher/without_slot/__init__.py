"""Sessions of sources that have no slot of their own."""
