"""What a person asks for, as the commands and Dagster's jobs do it."""
