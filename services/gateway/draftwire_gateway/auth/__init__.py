"""Authentication and rate limits of callers."""
