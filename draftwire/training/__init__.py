"""Trains draft heads for a target of one's own: `draftwire train`."""
