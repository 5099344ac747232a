"""Whether two lakes of one source are the same at a mark that both have."""
