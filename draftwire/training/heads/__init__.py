"""Trains draft heads for any target: on the features and logits of the target's own decoder."""
