"""The commands for those who read the log beside the lake."""
