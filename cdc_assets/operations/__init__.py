"""What a person asks for, as the commands and Dagster's jobs do it.

Each works whether or not a flusher and other runs are active: it waits for work that somebody else
has begun, and never repeats it.
"""
