"""Figures of a source, from one look at the coordination database."""
