"""Drafting strategies: ways to guess the next few tokens, and to say how likely each guess was."""
