"""The demo's shop: its tables, and customers that buy."""
