"""Capabilities beside the path of a round, each a folder: a service loads what it was configured for."""
