"""Who is alive: heartbeats, the flusher that has the turn, and the workers that merge."""
