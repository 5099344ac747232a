"""Query mode: what it may be told, and what of the other settings it refuses."""
