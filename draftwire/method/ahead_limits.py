"""How far ahead of the verdict a drafter may draft. Imports nothing: the command line names these limits."""

MAX_ROUNDS_AHEAD = 4
"""A block is drafted at most so many rounds before its text is known."""
MAX_BRANCHES = 32
"""Texts of one session for which a drafter may draft ahead at once, and blocks that a verifier may hold of it."""
