"""Admission control: a session is admitted only if its KV cache can be reserved, so that none is ever evicted."""

from dataclasses import dataclass, field

from draftwire.engine.leases import SessionKey
from draftwire.errors import NoRoomError, ProtocolViolationError
from draftwire.models.kv_cache import BLOCK_SIZE, blocks_for


@dataclass(slots=True)
class Room:
    """Reservations of sessions and of KV cache blocks. Pure accounting: the engine never uses more than is reserved."""

    max_sessions: int
    kv_cache_tokens: int
    _blocks: dict[SessionKey, int] = field(default_factory=dict)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that no session has reserved."""
        return blocks_for(self.kv_cache_tokens) - sum(self._blocks.values())

    @property
    def size(self) -> int:
        """Capacity of the KV cache, tokens, in whole blocks."""
        return blocks_for(self.kv_cache_tokens) * BLOCK_SIZE

    @property
    def num_reserved(self) -> int:
        """Tokens of the KV cache that sessions have reserved, in whole blocks. Thread-safe."""
        return sum(list(self._blocks.values())) * BLOCK_SIZE

    @property
    def usage(self) -> float:
        """Share of the KV cache that is reserved, 0 to 1."""
        return self.num_reserved / self.size

    def reserve(self, key: SessionKey, num_tokens: int) -> None:
        """Reserves KV cache for a session of at most `num_tokens` tokens.

        Raises:
            NoRoomError: the session limit or the KV cache is exhausted. Nothing has changed.
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
        """Releases a session's reservation."""
        del self._blocks[key]


@dataclass(slots=True)
class ClosedEarly:
    """Sessions whose close arrived before their open, because the two messages travel on different connections.

    The late open is refused: no further close would arrive for that session.
    """

    bound: int = 4096
    """Keys that are kept; the oldest are evicted."""
    _keys: dict[SessionKey, None] = field(default_factory=dict)

    def add(self, key: SessionKey) -> None:
        """Records the close of a session that is not open."""
        self._keys[key] = None
        if len(self._keys) > self.bound:
            del self._keys[next(iter(self._keys))]

    def refuse(self, key: SessionKey) -> None:
        """Refuses a session that was closed before it was opened.

        Raises:
            ProtocolViolationError: the session was closed early.
        """
        if key in self._keys:
            raise ProtocolViolationError("the session was closed before it was opened")
