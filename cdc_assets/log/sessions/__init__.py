"""Who is alive: heartbeats, and the workers that merge."""
