"""Processes and threads of ours: children, back-off, traces, the runtime home."""
