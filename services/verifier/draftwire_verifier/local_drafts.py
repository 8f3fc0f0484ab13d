"""Drafts that the verifier makes by itself, from the committed tokens of a session. Pure: no tensors, no transport.

In rounds in which it does not draft, a session may have it watched how that would have fared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from draftwire.drafting.model_free.possible import possible
from draftwire.drafting.model_free.registry import TextDrafters
from draftwire.drafting.model_free.text_drafter import READ_AT_ONCE, FollowedText
from draftwire.errors import InvalidRequestError
from draftwire.method.encoding import Claim, DraftDistributions, decode_one
from draftwire.method.quantization import Encoding
from draftwire.method.rounds import Fence, LocalDraft, ReceivedBlock, TargetSessionSpec, WatchedGuess
from draftwire.requests.session_parameters import SessionParameters

MAX_WATCHED = 8192
"""Tokens of a text up to which guesses are watched that nobody asks for: an index takes some 500 bytes for each."""
NO_DRAFTER = -1
"""Identity of the sender of a local block: no drafter has it."""


@dataclass(slots=True, eq=False)
class LocalText:
    """Drafter of one session: a strategy, with its view of the text."""

    strategy: str
    """Name of a text drafter."""
    text: FollowedText
    """The committed tokens that were read."""
    num_draft_tokens: int = 0
    """Most tokens of a block; 0 while the rounds are plain."""

    @classmethod
    def open(cls, strategy: str, drafters: TextDrafters, parameters: SessionParameters) -> "LocalText":
        """Starts with no token read.

        Args:
            strategy: name of a text drafter.
            drafters: there are.
            parameters: of the session.
        """
        salt = parameters.cache_salt if parameters.shares_text else None
        return cls(strategy, drafters.named(strategy).open((), salt))

    def block(
        self,
        fence: Fence,
        committed: Sequence[int],
        spec: TargetSessionSpec,
        vocab_size: int,
    ) -> ReceivedBlock | None:
        """Returns the block of the open round; None if nothing is guessed.

        Forms are not followed here, on the event loop, where their masks would delay all sessions: rules refuse what
        they do not allow.

        Args:
            fence: of the round.
            committed: all committed tokens.
            spec: of the session.
            vocab_size: of the target.
        """
        if not self.num_draft_tokens or not self._reads(committed):
            return None
        token_ids = self._guess(self.num_draft_tokens, committed, spec, vocab_size)
        if not token_ids:
            return None
        has_distributions = spec.parameters.rule.needs_draft_probs
        encoding = Encoding.ONE_HOT if has_distributions else Encoding.NONE
        claim = Claim(token_ids, DraftDistributions(encoding, vocab_size))
        return ReceivedBlock(
            fence,
            token_ids,
            decode_one(claim, vocab_size),
            has_distributions,
            NO_DRAFTER,
            local_strategy=self.strategy,
        )

    def watch(
        self, committed: Sequence[int], token_ids: Sequence[int], spec: TargetSessionSpec, vocab_size: int
    ) -> WatchedGuess | None:
        """Returns how a draft would have fared in a round without one; None if the text was not read yet, or is longer
        than `MAX_WATCHED` and was to be drafted for by somebody else.

        Args:
            committed: all tokens before the round.
            token_ids: of the round.
            spec: of the session, which says what is watched.
            vocab_size: of the target.
        """
        if spec.watched is None or self.strategy not in (spec.watched.strategy, spec.watched.instead):
            return None
        if not self.num_draft_tokens and len(committed) > MAX_WATCHED:
            return None
        if not self._reads(committed):
            return None
        guessed = self._guess(spec.watched.num_draft_tokens, committed, spec, vocab_size)
        num_right = 0
        for guess, token in zip(guessed, token_ids, strict=False):
            if guess != token:
                break
            num_right += 1
        return WatchedGuess(bool(guessed), num_right)

    def _reads(self, committed: Sequence[int]) -> bool:
        """Reads more of the text, and returns whether all of it was read."""
        start = self.text.length
        self.text.commit(committed[start : start + READ_AT_ONCE])
        return self.text.length == len(committed)

    def _guess(self, num_tokens: int, committed: Sequence[int], spec: TargetSessionSpec, vocab_size: int) -> list[int]:
        """Returns what may follow the text, with room left for the verifier's own token."""
        room = spec.max_len - len(committed) - 1
        if room < 1:
            return []
        parameters = spec.parameters
        return possible(
            self.text.guess(min(num_tokens, room)).token_ids,
            len(committed) - parameters.prompt_len,
            parameters.sampling,
            parameters.stop_token_ids,
            vocab_size,
        )


def check_local(draft: LocalDraft, spec: TargetSessionSpec, drafters: TextDrafters, head: str = "") -> None:
    """Checks a requested draft.

    Args:
        draft: what is requested.
        spec: of the session.
        drafters: there are.
        head: name of the verifier's own head; empty if it has none.

    Raises:
        InvalidRequestError: a strategy is unknown, or the number is out of range.
    """
    for strategy in filter(None, (draft.strategy, draft.instead)):
        if not head or strategy != head:
            drafters.named(strategy)
    most = spec.parameters.max_draft_tokens
    if not 1 <= draft.num_draft_tokens <= most:
        raise InvalidRequestError(f"a local draft has 1 to {most} tokens here, not {draft.num_draft_tokens}")
