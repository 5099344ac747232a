"""What is wrong with those who read the log beside the lake."""
