"""The process that decodes, and what the flusher says to it."""
