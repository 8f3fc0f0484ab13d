"""Identity and progress of a session, independent of its peers. Its text is in `CommittedText`."""

import secrets
from contextlib import suppress
from typing import Protocol

from draftwire.errors import DraftwireError, ProtocolViolationError
from draftwire.method.keys import KEY_BYTES, Role, derive_key
from draftwire.method.rounds import CommittedTokens, Fence, Verdict
from draftwire.requests.logprobs import PromptPart
from draftwire.requests.session_parameters import SessionParameters
from draftwire_gateway.session.expected_verdict import ExpectedVerdict, check_top
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.ports import PeerPort
from draftwire_gateway.session.statistics import Statistics


class SessionTrace(Protocol):
    """Records what happens to a session that is traced."""

    @property
    def traceparent(self) -> str:
        """Parent of the services' spans; empty if nothing is recorded."""

    def add_event(self, event: str, **attributes: int | str) -> None:
        """Adds an event with the current time."""

    def end(self, session_id: int, statistics: Statistics, reason: str) -> None:
        """Ends the session, with a finish reason; empty if it was not finished."""


class SessionState:
    """One session: ids, keys and committed tokens. Outlives its peers."""

    def __init__(self, generation: Generation, trace: SessionTrace | None = None) -> None:
        """Starts after the tokens that were generated before an interruption, if any."""
        self.generation = generation
        self.session_id = secrets.randbits(64)
        self.permit_key = secrets.token_bytes(KEY_BYTES)
        """Key of the drafters' permits."""
        self.epoch = -1
        """Increased by the `VerifierSeat` only."""
        # A resumed completion must not reuse the random numbers of the rounds that made its first tokens, of which
        # there were at most as many as tokens.
        self.round = len(generation.generated_ids)
        self.committed = CommittedTokens([*generation.prompt_ids, *generation.generated_ids])
        self.num_generated = len(generation.generated_ids)
        """Tokens of the completion: the committed ones, cut at a stop."""
        self._num_reported = 1 if generation.logprobs.prompt_logprobs is not None else len(generation.prompt_ids)
        """Tokens of the prompt whose log-probabilities were reported; the first one has none."""
        self.expected = ExpectedVerdict(generation)
        """Limits of the open round's verdict."""
        self.statistics = Statistics(num_prompt_tokens=len(generation.prompt_ids))
        self._trace = trace

    @property
    def fence(self) -> Fence:
        """Fence of the open round."""
        return Fence(self.session_id, self.epoch, self.round, len(self.committed), self.committed.hash)

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.generation.max_tokens - self.num_generated

    @property
    def lacks_prompt(self) -> bool:
        """Whether log-probabilities of the prompt were requested and are not reported yet."""
        return self._num_reported < len(self.generation.prompt_ids)

    def check(self, verdict: Verdict, vocab_size: int) -> None:
        """Checks a verdict that has the open round's fence, and that the prompt parts before it held all that was
        requested.

        Raises:
            ProtocolViolationError: the verifier must not be believed.
        """
        if self.lacks_prompt:
            raise ProtocolViolationError("the verifier left out log-probabilities of the prompt")
        self.expected.check(verdict, vocab_size)

    def take_prompt(self, part: PromptPart, vocab_size: int) -> PromptPart | None:
        """Returns the new tokens of a part of the prompt's log-probabilities, if any: each is reported once, and a
        verifier that takes over starts again at the first.

        Raises:
            ProtocolViolationError: the verifier must not be believed.
        """
        check_top(part.tokens, self.generation.logprobs.prompt_logprobs, vocab_size)
        start, end = part.first_position, part.first_position + len(part.tokens)
        expected = self.generation.prompt_ids[start:end]
        if start > self._num_reported or [token.token_id for token in part.tokens] != expected:
            raise ProtocolViolationError("log-probabilities of other tokens than the prompt's next ones")
        first, self._num_reported = self._num_reported, max(self._num_reported, end)
        new = part.tokens[first - start :]
        return PromptPart(first, new) if new else None

    def commit(self, verdict: Verdict) -> None:
        """Commits all tokens of the open round, and starts the next round."""
        self.round += 1
        self.expected.end_round(verdict)
        self.committed.append(verdict.token_ids)
        self.statistics.count(verdict)

    def count(self, num_tokens: int) -> None:
        """Adds committed tokens to the completion's count; negative numbers remove tokens that were cut."""
        self.num_generated += num_tokens
        self.statistics.num_generated_tokens += num_tokens

    def key(self, role: Role) -> bytes:
        """Returns the random key of a role; under a coupled rule drafter and verifier share one."""
        return derive_key(self.generation.seed, Role.COUPLING if self.generation.rule.is_coupled else role)

    def close_at(self, peer: PeerPort) -> None:
        """Closes the session on a peer of the current epoch."""
        with suppress(DraftwireError):  # an unreachable peer ends the session with its lease
            peer.close(self.session_id, self.epoch)

    @property
    def numbers_are_fresh(self) -> bool:
        """`Generation.numbers_are_fresh` in the session's epoch."""
        return self.generation.numbers_are_fresh(self.epoch)

    @property
    def parameters(self) -> SessionParameters:
        """Parameters of the request that both services need."""
        generation = self.generation
        return SessionParameters(
            prompt_len=len(generation.prompt_ids),
            sampling=generation.sampling,
            rule=generation.rule,
            max_draft_tokens=generation.num_speculative_tokens,
            stop_token_ids=generation.stop_token_ids,
            choice=generation.choice,
            cache_salt=generation.cache_salt,
            traceparent="" if self._trace is None else self._trace.traceparent,
            form_memory_bytes=generation.form_memory_bytes,
            shares_text=self.numbers_are_fresh,
        )

    def add_event(self, event: str, **attributes: int | str) -> None:
        """Adds an event to the choice's span, if the request is traced."""
        if self._trace is not None:
            self._trace.add_event(event, **attributes)

    def end(self, reason: str) -> None:
        """Ends the choice's span with the finish reason; empty if the choice was not finished."""
        if self._trace is not None:
            self._trace.end(self.session_id, self.statistics, reason)
