"""What has to be right at the source, and what the log remembers of it."""
