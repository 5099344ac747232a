"""Pins whose point is no slot's: of a locked table, and of query mode."""
