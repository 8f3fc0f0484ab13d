"""Who may open a session: as many as there is room for, so that nobody who was let in has to leave."""

from dataclasses import dataclass, field

from draftwire.engine.leases import SessionKey
from draftwire.errors import NoRoomError, ProtocolViolationError
from draftwire.models.kv_cache import BLOCK_SIZE, blocks_for


@dataclass(slots=True)
class Room:
    """Reservations of sessions and of KV cache. Pure accounting: it is what the engine never uses more of."""

    max_sessions: int
    kv_cache_tokens: int
    _blocks: dict[SessionKey, int] = field(default_factory=dict)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that no session has reserved."""
        return blocks_for(self.kv_cache_tokens) - sum(self._blocks.values())

    @property
    def size(self) -> int:
        """Tokens that the KV cache has room for, in whole blocks."""
        return blocks_for(self.kv_cache_tokens) * BLOCK_SIZE

    @property
    def num_reserved(self) -> int:
        """Tokens of it that sessions have reserved, in whole blocks. Any thread may ask."""
        return sum(list(self._blocks.values())) * BLOCK_SIZE

    @property
    def usage(self) -> float:
        """Share of the KV cache that is reserved, 0 to 1."""
        return self.num_reserved / self.size

    def reserve(self, key: SessionKey, num_tokens: int) -> None:
        """Reserves room for a session of at most `num_tokens` tokens.

        Raises:
            NoRoomError: there is none now. Nothing has changed.
        """
        if len(self._blocks) >= self.max_sessions:
            raise NoRoomError(f"{self.max_sessions} sessions are open, which is the limit; retry later")
        if blocks_for(num_tokens) > self.num_free_blocks:
            raise NoRoomError(
                f"no room for a session of up to {num_tokens} tokens: {self.num_free_blocks * BLOCK_SIZE} of the KV "
                f"cache's {self.kv_cache_tokens} tokens are not reserved; ask for fewer max_tokens, or retry later"
            )
        self._blocks[key] = blocks_for(num_tokens)

    def release(self, key: SessionKey) -> None:
        """Gives back a session's reservation."""
        del self._blocks[key]


@dataclass(slots=True)
class ClosedEarly:
    """Sessions that were closed before they were opened, because the two messages travel on different connections.

    Such an opening comes too late: nobody would close the session again.
    """

    bound: int = 4096
    """Sessions that are remembered; the oldest are forgotten."""
    _keys: dict[SessionKey, None] = field(default_factory=dict)

    def add(self, key: SessionKey) -> None:
        """Remembers a session that is closed and not open."""
        self._keys[key] = None
        if len(self._keys) > self.bound:
            del self._keys[next(iter(self._keys))]

    def refuse(self, key: SessionKey) -> None:
        """Makes sure that a session was not closed early.

        Raises:
            ProtocolViolationError: it was.
        """
        if key in self._keys:
            raise ProtocolViolationError("the session was closed before it was opened")
