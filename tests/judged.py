"""Parts of steps of a target."""

from typing import Any

from draftwire.models.kv_cache import CachedSequence
from draftwire.verification.target import Judging


def judging_of(sequence: CachedSequence, committed: list[int], *block: Any, **given: Any) -> Judging:
    """Returns a part of a step: after the committed tokens come the block, its distributions, sampling, rule and key,
    and perhaps the length of the prompt and the stop tokens.
    """
    of_block, of_text = block[:5], block[5:]
    return Judging(*of_block, len(committed), *of_text, sequence=sequence, committed=committed, **given)
