"""Pins of a server that isn't the source: a physical copy of it, or a database with its dump."""
