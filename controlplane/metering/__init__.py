"""What was used, written where it cannot be lost: a local journal first, PostgreSQL in batches after."""
