"""What people ask for, as the log keeps it: pauses, the end of a source, and marks."""
