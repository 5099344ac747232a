"""Staged files: their form, and the places where they are."""
