"""What the log remembers of the followed tables' heaps, and what a change of them means."""
