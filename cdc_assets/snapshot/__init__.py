"""The copy: chunks of a pinned snapshot, read by Spark tasks and appended in waves."""
