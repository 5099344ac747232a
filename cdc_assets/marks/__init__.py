"""One position of the source across all lake tables: marks are made, kept and dropped."""
