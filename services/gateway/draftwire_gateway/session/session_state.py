"""What a session is and how far it has come, whoever serves it. Knows no text: that is `CommittedText`'s."""

import secrets
from contextlib import suppress

from draftwire.errors import DraftwireError
from draftwire.method.keys import KEY_BYTES, Role, derive_key
from draftwire.method.rounds import CommittedTokens, Fence, Verdict
from draftwire.requests.session_parameters import SessionParameters
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.ports import DrafterPort, TargetPort
from draftwire_gateway.session.prompt_report import PromptReport
from draftwire_gateway.session.spans import ChoiceSpans
from draftwire_gateway.session.statistics import Statistics


class SessionState:
    """One session: its names and keys, and all that it has committed. Outlives its peers."""

    def __init__(self, generation: Generation, spans: ChoiceSpans | None = None) -> None:
        """Begins after what was generated before, if something was.

        Args:
            generation: what is wanted.
            spans: records what becomes of the session; None records nothing.
        """
        self.generation = generation
        self.session_id = secrets.randbits(64)
        self.permit_key = secrets.token_bytes(KEY_BYTES)
        """Makes the permits of its drafters."""
        self.epoch = -1
        """Raised by the verifier's seat only."""
        # A resumed completion must not draw with the numbers of the rounds that made its first tokens. There were at
        # most as many rounds as tokens.
        self.round = len(generation.generated_ids)
        self.committed = CommittedTokens([*generation.prompt_ids, *generation.generated_ids])
        self.num_generated = len(generation.generated_ids)
        """Tokens of the completion: what is committed, cut at a stop."""
        self.prompt = PromptReport(generation.prompt_ids, generation.logprobs.prompt_logprobs is not None)
        self.statistics = Statistics(num_prompt_tokens=len(generation.prompt_ids))
        self._spans = spans

    @property
    def fence(self) -> Fence:
        """Of the round that is open."""
        return Fence(self.session_id, self.epoch, self.round, len(self.committed), self.committed.hash)

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.generation.max_tokens - self.num_generated

    def has_all_of(self, verdict: Verdict) -> bool:
        """Whether a verdict, and what came before it, says all that is to be reported."""
        is_wanted = self.generation.logprobs.logprobs is not None
        has_draft = len(verdict.draft_logprobs) == len(verdict.token_ids) * self.generation.token_details
        has_all = len(verdict.logprobs) == len(verdict.token_ids) * is_wanted
        return not self.prompt.is_missing and has_all and has_draft

    def commit(self, verdict: Verdict) -> None:
        """Commits all tokens of the open round, which ends it."""
        self.round += 1
        self.committed.append(verdict.token_ids)
        self.statistics.count(verdict)

    def count(self, num_tokens: int) -> None:
        """Counts committed tokens as part of the completion, or out of it."""
        self.num_generated += num_tokens
        self.statistics.num_generated_tokens += num_tokens

    def key(self, role: Role) -> bytes:
        """Returns the key of a role; under a coupled rule both sides draw with the same."""
        return derive_key(self.generation.seed, Role.COUPLING if self.generation.rule.is_coupled else role)

    def close_at(self, peer: TargetPort | DrafterPort) -> None:
        """Ends the session at a peer of the current epoch."""
        with suppress(DraftwireError):  # a peer that cannot be told ends the session with its lease
            peer.close(self.session_id, self.epoch)

    @property
    def parameters(self) -> SessionParameters:
        """What both peers have to know of the request."""
        return self.generation.session_parameters("" if self._spans is None else self._spans.traceparent)

    def note(self, event: str, **attributes: int | str) -> None:
        """Records that something happened now."""
        if self._spans is not None:
            self._spans.note(event, **attributes)

    def end(self, reason: str) -> None:
        """Records the end, and why; empty if it was not finished."""
        if self._spans is not None:
            self._spans.end(self.session_id, self.statistics, reason)
