"""Numbers and values that all share: distributions and how they travel, sampling, randomness, rounds."""
