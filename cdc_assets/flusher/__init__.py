"""The flusher: streams the slot, stages changes as Parquet, registers them, then acks."""
