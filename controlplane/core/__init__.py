"""What everything stands on: ids, errors, clock, json, page tokens, sealing. No I/O beyond key files, no SQLAlchemy."""
