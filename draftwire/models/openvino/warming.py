"""Steps of the usual sizes, made before they are needed: the plugin prepares itself for each number of rows that it
meets, which takes 3 to 25 ms once.
"""

from draftwire.models.cached_model import CachedModel
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.sequence_model import Reading

MOST_ROWS = 40
"""Rows of eight sessions with four draft tokens each, or of four with nine."""


def warm_up(model: CachedModel) -> None:
    """Makes a step of each number of rows, as far as the cache has room, and forgets them: the fewest first, since they
    would be padded to more after those.
    """
    sequence = model.cache.open()
    for num_rows in range(1, min(MOST_ROWS, model.cache.num_blocks * BLOCK_SIZE) + 1):
        model.read([Reading(sequence, [0] * num_rows, num_rows)])
        model.cache.truncate(sequence, 0)
    model.cache.close(sequence)
