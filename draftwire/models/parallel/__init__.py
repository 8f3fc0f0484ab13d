"""Models that several devices or processes compute together."""
