"""The materializer: folds the log by key and merges it into the lake, exactly once."""
