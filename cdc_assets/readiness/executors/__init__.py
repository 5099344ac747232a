"""Whether Spark's executors, on machines of their own, are what tasks need, and reach all of it."""
