"""What a source's YAML says of those who read its log beside the lake."""
