"""A source of blocks of one's own, inside the verifier: what came after the last token when it stood there before.

Blocks are guesses that depend on the committed tokens alone, and the rule decides about them as about any block: the
output has the target's law whatever is guessed. Another guess is another `guess`.

    draftwire serve verifier --block-sources examples.sources.second_time:SecondTime ...
    draftwire generate --drafter second_time "..."
"""

from collections.abc import Sequence

from draftwire.engine.target_session import LocalSource, TargetSession
from draftwire.method.rounds import ReceivedBlock, TargetSessionSpec
from draftwire.options.model_free.local_texts import block_of_guess


class SecondTime(LocalSource):
    """Guesses for one session."""

    name = "second_time"
    """Name for which requests ask."""

    def __init__(self, spec: TargetSessionSpec, vocab_size: int) -> None:
        """Knows of a session what it was opened with."""
        super().__init__(self.name)
        self._max_len, self._vocab_size = spec.max_len, vocab_size

    def block(self, session: TargetSession) -> ReceivedBlock | None:
        """Returns the block of the round that begins; None for a plain round."""
        token_ids = session.committed.ids
        room = min(self.num_draft_tokens, self._max_len - len(token_ids) - 1)  # one is left for the target's own token
        guess = self.guess(token_ids)[: max(0, room)]
        return block_of_guess(session, guess, self.strategy, self._vocab_size) if guess else None

    def guess(self, token_ids: Sequence[int]) -> list[int]:
        """Returns tokens that may follow a text."""
        last = len(token_ids) - 1
        before = next((place for place in range(last - 1, -1, -1) if token_ids[place] == token_ids[last]), last)
        return list(token_ids[before + 1 :])
