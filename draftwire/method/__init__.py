"""Types and functions that all services share: distributions and their encoding, sampling, randomness, rounds."""
