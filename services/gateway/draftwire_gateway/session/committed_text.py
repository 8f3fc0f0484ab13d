"""Text of the committed tokens, stop conditions and finish reasons."""

from dataclasses import dataclass, field
from enum import Enum

from draftwire.method.round_parts import LogprobsPart
from draftwire.method.rounds import Verdict
from draftwire.method.token_source import TokenSource
from draftwire.requests.logprobs import TokenLogprob
from draftwire_gateway.session.session_state import SessionState
from draftwire_gateway.session.statistics import Statistics
from draftwire_gateway.text.text import TextStream


class FinishReason(Enum):
    """Reason why a completion ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens and text of a round that became final."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each of the tokens, if requested."""
    sources: list[TokenSource] = field(default_factory=list)
    """Source of each token."""
    num_draft_tokens: int = 0
    """Draft tokens that the round verified."""
    draft_logprobs: list[float] = field(default_factory=list)
    """The drafter's log-probability of each token, if requested; see `LogprobsPart.draft`."""
    text_lengths: list[int] = field(default_factory=list)
    """Characters of the text that became final with each token, if requested."""
    num_draft_positions: int = 0
    """Number of these that could all have been accepted."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a completion."""

    reason: FinishReason
    statistics: Statistics
    drafter_error: str
    """Error of the drafter that was lost last; empty if none was lost."""


class CommittedText:
    """Commits the rounds of a session, cuts them at a stop, and converts them to text."""

    def __init__(self, session: SessionState, text: TextStream) -> None:
        """`text` already contains the tokens that a resumed completion starts with."""
        self._session = session
        self._text = text

    def reason_before(self) -> FinishReason | None:
        """Returns the finish reason if a resumed completion is already complete: its whole text was sent before."""
        generation = self._session.generation
        stops = bool(generation.generated_ids) and generation.generated_ids[-1] in generation.stop_token_ids
        if not self._session.num_left:
            self._text.finish()  # may complete a stop string
        if stops or self._text.stopped:
            return FinishReason.STOP
        if self._session.lacks_prompt:  # a verifier sends the log-probabilities only along with a token
            return None
        return None if self._session.num_left else FinishReason.LENGTH

    def commit(self, verdict: Verdict) -> tuple[list[int], FinishReason | None]:
        """Commits a round. Returns its tokens up to a stop token or the limit, and the finish reason, if any."""
        self._session.commit(verdict)
        shown = verdict.token_ids[: self._session.num_left]
        stops = [index for index, token in enumerate(shown) if token in self._session.generation.stop_token_ids]
        if stops:
            shown = shown[: stops[0] + 1]
        self._session.count(len(shown))
        if stops:
            return shown, FinishReason.STOP
        return shown, None if self._session.num_left else FinishReason.LENGTH

    def show(
        self, verdict: Verdict, token_ids: list[int], reason: FinishReason | None
    ) -> tuple[Delta, FinishReason | None]:
        """Returns the delta of a committed round, from what `commit` returned, and the finish reason, if any. Tokens
        after one that completes a stop string are cut.
        """
        visible = token_ids[:-1] if reason is FinishReason.STOP else token_ids  # a stop token has no text
        text, num_used, lengths = self._text.push(visible)
        if self._text.stopped:
            self._session.count(num_used - len(token_ids))
            token_ids = token_ids[:num_used]
            reason = FinishReason.STOP
        if reason is not None:
            text += self._text.finish()
            if self._text.stopped:  # the held-back rest completed a stop string
                reason = FinishReason.STOP
        return self._delta(verdict, token_ids, text, lengths), reason

    def _delta(self, verdict: Verdict, token_ids: list[int], text: str, lengths: list[int]) -> Delta:
        """Returns the delta of a round, of which `token_ids` are the first tokens, maybe not all."""
        num_tokens = len(token_ids)
        lengths = lengths + [0] * (num_tokens - len(lengths)) if self._session.generation.token_details else []
        if lengths:  # text that was held back until the end counts for the last token
            lengths[-1] += len(text) - sum(lengths)
        logprobs = verdict.logprobs or LogprobsPart()
        return Delta(
            token_ids,
            text,
            logprobs.target[:num_tokens],
            verdict.sources[:num_tokens],
            verdict.num_draft_tokens,
            logprobs.draft[:num_tokens],
            lengths,
            verdict.num_draft_positions,
        )
