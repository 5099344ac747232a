"""The coordination schema: its versions, and whose it may be."""
