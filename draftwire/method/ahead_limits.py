"""How far ahead of the verdict a drafter may draft. Imports nothing: the command line names these limits."""

MAX_ROUNDS_AHEAD = 2
"""A block is drafted at most so many rounds before its text is known: more were never compared with the exact law."""
MAX_BRANCHES = 32
"""Texts of one session for which a drafter may draft ahead at once, and blocks that a verifier may hold of it."""


def held_blocks(max_branches: int, rounds_ahead: int) -> int:
    """Returns how many blocks a verifier holds of a session, so that a drafter with so many branches need never wait.

    A round leaves blocks behind: those for rounds after the next that continue another text than its own. Until these
    rounds begin, the verifier cannot tell them from others.

    Args:
        max_branches: texts for which the drafter drafts ahead at once, an equal share for each round.
        rounds_ahead: rounds for which it does.
    """
    return min(MAX_BRANCHES, -(-max_branches * (rounds_ahead + 1) // 2))
