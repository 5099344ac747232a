"""What Postgres is and says: catalog, types, LSNs, pgoutput, publications, slots, sessions."""
