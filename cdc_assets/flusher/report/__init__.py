"""How a flusher is: its report in the coordination database, and its metrics for Prometheus."""
