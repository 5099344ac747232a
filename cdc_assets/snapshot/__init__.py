"""The copy: chunks of a pinned snapshot, claimed and written by Spark tasks, landed by commits."""
