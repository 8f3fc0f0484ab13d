"""The exact law of texts that the services' own code generates: see `tests.enumerated.network`."""
