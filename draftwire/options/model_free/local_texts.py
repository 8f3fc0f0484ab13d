"""Drafts that the verifier makes by itself, from the committed tokens of a session. Pure: no tensors, no transport.

In rounds in which it does not draft, a session may have it watched how that would have fared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from draftwire.engine.target_session import NO_DRAFTER, LocalSource, TargetSession
from draftwire.method.encoding import Claim, DraftDistributions, decode_one
from draftwire.method.quantization import Encoding
from draftwire.method.round_parts import GuessPart, WatchedGuess
from draftwire.method.rounds import ReceivedBlock, TargetSessionSpec, Verdict
from draftwire.options.model_free.possible import possible
from draftwire.options.model_free.registry import TextDrafters
from draftwire.options.model_free.text_drafter import READ_AT_ONCE, FollowedText

MAX_WATCHED = 8192
"""Tokens of a text up to which guesses are watched that nobody asks for: an index takes some 500 bytes for each."""


def block_of_guess(session: TargetSession, token_ids: list[int], strategy: str, vocab_size: int) -> ReceivedBlock:
    """Returns a block of tokens that depend on committed ones alone, as blocks of drafters are received.

    Args:
        session: its open round is to be decided about the block.
        token_ids: at least one, below `vocab_size`; with the target's own token they fit into the session's `max_len`.
        strategy: of the verifier, which guessed them.
        vocab_size: of the target.
    """
    has_distributions = session.spec.parameters.rule.needs_draft_probs
    encoding = Encoding.ONE_HOT if has_distributions else Encoding.NONE
    decoded = decode_one(Claim(token_ids, DraftDistributions(encoding, vocab_size)), vocab_size)
    return ReceivedBlock(session.fence, token_ids, decoded, has_distributions, NO_DRAFTER, local_strategy=strategy)


@dataclass(slots=True, eq=False, kw_only=True)
class LocalText(LocalSource):
    """A text drafter with its view of one session's text."""

    text: FollowedText
    """The committed tokens that were read."""
    vocab_size: int
    """Size of the target's vocabulary."""

    @classmethod
    def open(cls, drafters: TextDrafters, vocab_size: int, spec: TargetSessionSpec, strategy: str) -> "LocalText":
        """Starts with no token read; see `OpenSource`. The first arguments are of the verifier."""
        salt = spec.parameters.cache_salt if spec.parameters.shares_text else None
        return cls(strategy, text=drafters.named(strategy)(salt=salt), vocab_size=vocab_size)

    @override
    def block(self, session: TargetSession) -> ReceivedBlock | None:
        """Returns the guess of the round; None if there is none.

        Forms are not followed here, on the event loop, where their masks would delay all sessions: rules refuse what
        they do not allow.
        """
        token_ids = self._guess(session, len(session.committed), self.num_draft_tokens)
        return block_of_guess(session, token_ids, self.strategy, self.vocab_size) if token_ids else None

    @override
    def report(
        self, session: TargetSession, verdict: Verdict, block: ReceivedBlock | None, *, has_failed: bool
    ) -> Verdict:
        """Adds how a guess would have fared, if the session has it watched."""
        verdict = super(LocalText, self).report(session, verdict, block, has_failed=has_failed)
        if verdict.guess is not None:
            return verdict
        watched = self._watch(session, verdict.fence.prefix_len, verdict.token_ids)
        return verdict if watched is None else replace(verdict, guess=GuessPart(watched=watched))

    @override
    def close(self, session: TargetSession) -> None:
        self.text.close(session.spec.parameters.prompt_len)

    def _watch(self, session: TargetSession, length: int, token_ids: Sequence[int]) -> WatchedGuess | None:
        """Compares a guess after the first `length` tokens with those of the round; returns None if the text was not
        read yet, or is longer than `MAX_WATCHED` and was to be drafted for by somebody else.
        """
        watched = session.spec.watched
        if watched is None or self.strategy not in (watched.strategy, watched.instead):
            return None
        if session.run_source is not self and length > MAX_WATCHED:
            return None
        guessed = self._guess(session, length, watched.num_draft_tokens)
        if guessed is None:
            return None
        num_right = 0
        for guess, token in zip(guessed, token_ids, strict=False):
            if guess != token:
                break
            num_right += 1
        return WatchedGuess(bool(guessed), num_right)

    def _guess(self, session: TargetSession, length: int, num_tokens: int) -> list[int] | None:
        """Reads more of the first `length` tokens, and returns what may follow them, with room left for the verifier's
        own token; None if some were not read yet.
        """
        spec, parameters, start = session.spec, session.spec.parameters, self.text.length
        self.text.commit(session.committed.ids[start : min(start + READ_AT_ONCE, length)])
        if self.text.length < length:
            return None
        room = spec.max_len - length - 1
        if room < 1:
            return []
        return possible(
            self.text.guess(min(num_tokens, room)).token_ids,
            length - parameters.prompt_len,
            parameters.sampling,
            parameters.stop_token_ids,
            self.vocab_size,
        )
