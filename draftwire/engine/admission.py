"""Admission control: a session is admitted only if its KV cache can be reserved, so that none is ever evicted."""

from dataclasses import dataclass, field

from draftwire.engine.leases import SessionKey
from draftwire.errors import NoRoomError, ProtocolViolationError
from draftwire.models.kv_cache import BLOCK_SIZE


@dataclass(slots=True)
class Room:
    """Reservations of sessions and of KV cache blocks. Pure accounting: the engine never uses more than is reserved."""

    max_sessions: int
    kv_cache_tokens: int
    block_size: int = BLOCK_SIZE
    """Tokens in a block of the engine's KV cache, of which a session holds whole ones."""
    spare_tokens: int = 0
    """Tokens that a session may hold beyond the longest text that it reserves room for."""
    _blocks: dict[SessionKey, int] = field(default_factory=dict)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that no session has reserved."""
        return self._blocks_for(self.kv_cache_tokens) - sum(self._blocks.values())

    @property
    def size(self) -> int:
        """Capacity of the KV cache, tokens, in whole blocks."""
        return self._blocks_for(self.kv_cache_tokens) * self.block_size

    @property
    def num_reserved(self) -> int:
        """Tokens of the KV cache that sessions have reserved, in whole blocks. Thread-safe."""
        return sum(list(self._blocks.values())) * self.block_size

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
        num_blocks = self._blocks_for(num_tokens + self.spare_tokens)
        if num_blocks > self.num_free_blocks:
            raise NoRoomError(
                f"no room for a session of up to {num_tokens} tokens: {self.num_free_blocks * self.block_size} of the "
                f"KV cache's {self.kv_cache_tokens} tokens are not reserved; ask for fewer max_tokens, or retry later"
            )
        self._blocks[key] = num_blocks

    def release(self, key: SessionKey) -> None:
        """Releases a session's reservation."""
        del self._blocks[key]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


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
