"""Ids of server-sent events: which choice they are of, and a hash of all its tokens so far."""

import hashlib
from array import array
from collections.abc import Iterable

HASH_BYTES = 8


class EventIds:
    """Makes the ids of the events of one choice."""

    def __init__(self, choice: int, token_ids: Iterable[int] = ()) -> None:
        """Starts after tokens of an interrupted response."""
        self._choice = choice
        self._num_tokens = 0
        self._hash = hashlib.blake2b(digest_size=HASH_BYTES)
        self.add(token_ids)

    def add(self, token_ids: Iterable[int]) -> str:
        """Returns the id of an event with further tokens."""
        added = array("Q", token_ids)
        self._hash.update(added)
        self._num_tokens += len(added)
        return f"{self._choice}-{self._num_tokens}-{self._hash.hexdigest()}"


def event_id_of(choice: int, token_ids: Iterable[int]) -> str | None:
    """Returns the id of an event after these tokens of a choice; None if they are no ids."""
    try:
        return EventIds(choice).add(token_ids)
    except OverflowError:
        return None
