"""Jobs that a person starts in the UI: resync, pause, resume, verify, drop."""
