"""May it begin? What ``check`` finds, and what the flusher refuses to begin with."""
