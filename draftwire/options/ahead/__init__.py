"""Blocks that are drafted before the text that they continue is known."""
