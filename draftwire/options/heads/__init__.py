"""Trained heads that draft from the hidden states of the target."""
