"""A schema change of the source, in its place in the log, made in the lake table."""
