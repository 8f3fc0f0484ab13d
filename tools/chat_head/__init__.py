"""Texts that a chat model wrote itself, and the head that learns to draft them; not installed."""
