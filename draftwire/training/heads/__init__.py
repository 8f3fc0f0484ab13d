"""Trains draft heads on any target: on what the target's own decoder says of texts."""
