"""Being told: conditions from facts, transitions of conditions, messages, and where they go."""
