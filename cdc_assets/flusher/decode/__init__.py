"""From pgoutput messages to the rows of staged files, by columns."""
