"""Lake tables that others have made, and that are taken over without a copy."""
