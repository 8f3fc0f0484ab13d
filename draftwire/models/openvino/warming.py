"""Steps of the usual sizes, made before they are needed: the plugin prepares itself for each number of rows that it
meets, which takes 3 to 25 ms once.
"""

from collections.abc import Iterator

from draftwire.models.cached_model import CachedModel
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.sequence_model import Reading

FIRST_ROWS = 9
"""Rows of a session with eight draft tokens: what the first request has."""
MOST_ROWS = 40
"""Rows of eight sessions with four draft tokens each, or of four with nine."""


def warm_up(model: CachedModel) -> Iterator[int]:
    """Makes the steps of a single session, as far as the cache has room, and forgets them: the fewest rows first, since
    they would be padded to more after those. Returns what makes a larger one each time, and yields its rows: for times
    at which no session is open.
    """
    steps = _steps(model, min(MOST_ROWS, model.cache.num_blocks * BLOCK_SIZE))
    for num_rows in steps:
        if num_rows == FIRST_ROWS:
            break
    return steps


def _steps(model: CachedModel, most: int) -> Iterator[int]:
    for num_rows in range(1, most + 1):
        sequence = model.cache.open()
        model.read([Reading(sequence, [0] * num_rows, num_rows)])
        model.cache.close(sequence)
        yield num_rows
