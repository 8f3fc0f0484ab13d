"""Results of a request: pieces of completions, and the completions collected from them."""

from dataclasses import dataclass, field
from itertools import accumulate

from draftwire.errors import InvalidRequestError, ProtocolViolationError
from draftwire.method.token_source import TokenSource
from draftwire.requests.logprobs import TokenLogprob
from draftwire.requests.packed_logprobs import PackedTop, unpack_top
from draftwire.v1 import gateway_pb2

_SOURCES = {
    gateway_pb2.TOKEN_SOURCE_ACCEPTED: TokenSource.ACCEPTED,
    gateway_pb2.TOKEN_SOURCE_RECOVERED: TokenSource.RECOVERED,
    gateway_pb2.TOKEN_SOURCE_BONUS: TokenSource.BONUS,
    gateway_pb2.TOKEN_SOURCE_PLAIN: TokenSource.PLAIN,
}
_FINISH_REASONS = {gateway_pb2.FINISH_REASON_STOP: "stop", gateway_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens with their final text, an echoed prompt, or log-probabilities of a part of the prompt."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    """One for each of the tokens; None unless requested."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of the prompt's tokens but its first. They arrive in pieces of their own, before all others."""
    choice: int = 0
    """Index of the completion; in a piece with `prompt_logprobs`, of the prompt's first completion."""
    prompt_token_ids: list[int] | None = None
    """Token ids of an echoed prompt, whose text the piece holds; None in other pieces."""
    sources: list[TokenSource] = field(default_factory=list)
    """Source of each token. The tokens of a piece are of one round."""
    num_draft_tokens: int = 0
    """Draft tokens that the round verified."""
    token_texts: list[str] | None = None
    """The part of the text that each token made final; None unless requested with `token_details`."""
    draft_logprobs: list[float] | None = None
    """Log-probability of each token in the distribution that the drafter drew its draft token from at this position:
    -inf for a token that could not be drawn, NaN without a draft token. None unless requested."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished completion, or the end of a streamed one."""

    text: str
    """The text; with `echo`, it begins with the prompt's."""
    token_ids: list[int]
    """Generated tokens."""
    finish_reason: str
    """"stop" or "length"."""
    seed: int
    """The seed that was used: the one that was given, or the one that the server drew. A completion that was resumed
    without a given one has several, of which this is the last part's."""
    rejection_sample_method: str
    """The verification rule that was used."""
    is_lossy: bool
    """Whether that rule changes the distribution of the text."""
    drafter_error: str
    """Reason why the completion went on without a drafter; empty if no drafter was lost."""
    statistics: gateway_pb2.GenerationStatistics
    """Statistics; after an interruption, of the last part only."""
    num_resumed: int = 0
    """How often the completion was interrupted after its first token, and resumed."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of the tokens; None unless requested."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One for each token of the prompt but the first; None unless requested."""
    sources: list[TokenSource] = field(default_factory=list)
    """Source of each token."""
    token_texts: list[str] | None = None
    """Texts of the tokens, as in `Piece`."""
    draft_logprobs: list[float] | None = None
    """Log-probabilities of the drafter, as in `Piece`."""
    choice: int = 0
    """Index among the request's completions, counted over all its prompts."""
    prompt_text: str | None = None
    """The prompt's token ids, decoded; None unless echoed."""
    prompt_token_ids: list[int] | None = None
    """Token ids of the prompt; None unless echoed."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time from the request's arrival to its last token, at the gateway."""
        return self.statistics.num_generated_tokens / max(self.statistics.duration_us, 1) * 1e6

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted per forward pass of the target."""
        return self.statistics.num_emitted_tokens / max(self.statistics.num_rounds, 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over those that could have been, of a tree its longest path; 0 without drafts."""
        statistics = self.statistics
        return statistics.num_accepted_tokens / max(statistics.num_draft_positions or statistics.num_draft_tokens, 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """`acceptance_rate`, under the name that other servers use."""
        return self.acceptance_rate

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of tokens emitted in a round that verified a draft block; 0 if there was none."""
        return self.statistics.mean_acceptance_length

    @property
    def acceptance_histogram(self) -> list[int]:
        """Rounds that verified a draft block, by how many of its tokens were accepted: 0, 1, 2, ..."""
        return list(self.statistics.acceptance_histogram)

    @property
    def draft_length_histogram(self) -> list[int]:
        """Rounds by how many draft tokens they judged: 0, 1, 2, ..."""
        return list(self.statistics.draft_length_histogram)

    @property
    def num_spec_steps(self) -> int:
        """Rounds that verified a draft block."""
        return self.statistics.num_drafts

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens verified."""
        return self.statistics.num_draft_tokens

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Draft tokens accepted."""
        return self.statistics.num_accepted_tokens


class CollectedPrompt:
    """A prompt's echo and log-probabilities, received over all calls, and its completions."""

    def __init__(self, request: gateway_pb2.GenerateRequest, choices: range) -> None:
        """Starts empty. `choices` are the indices of the prompt's completions."""
        self.is_echoed = request.echo
        self.text: str | None = None
        self.token_ids: list[int] | None = None
        self.logprobs: list[TokenLogprob] | None = [] if request.HasField("prompt_logprobs") else None
        self.completions = [CollectedCompletion(request, choice, self) for choice in choices]

    def take_echo(self, message: gateway_pb2.PromptEcho) -> list[Piece]:
        """Stores the echo. Returns a piece for each completion; none if the echo was received before."""
        if self.text is not None or not self.is_echoed:
            return []
        self.text, self.token_ids = message.text, list(message.token_ids)
        return [completion.begin(self.text, self.token_ids) for completion in self.completions]

    def take_logprobs(self, message: gateway_pb2.PromptLogprobs) -> Piece | None:
        """Adds log-probabilities. Returns None if all were received before, as after a resumed call.

        Raises:
            ProtocolViolationError: tokens are missing.
        """
        if self.logprobs is None:
            return None
        num_known = len(self.logprobs) + 1 - message.first_position
        if num_known < 0:
            raise ProtocolViolationError("the gateway leaves out log-probabilities of the prompt")
        new = _tokens(message)[num_known:]
        self.logprobs += new
        if not new:
            return None
        first = self.completions[0]
        return Piece([], "", [] if first.logprobs is not None else None, new, first.choice)

    def check_whole(self, num_tokens: int) -> None:
        """Checks that the requested echo and log-probabilities of a prompt of `num_tokens` tokens were received.

        Raises:
            ProtocolViolationError: something is missing.
        """
        if self.logprobs is not None and len(self.logprobs) != max(0, num_tokens - 1):
            raise ProtocolViolationError("the gateway leaves out log-probabilities of the prompt")
        if self.is_echoed and self.text is None:
            raise ProtocolViolationError("the gateway does not send the prompt back")


class CollectedCompletion:
    """Tokens and text of a completion, received over all calls."""

    def __init__(self, request: gateway_pb2.GenerateRequest, choice: int, prompt: CollectedPrompt) -> None:
        self.choice = choice
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = [] if request.HasField("logprobs") else None
        self.completion: Completion | None = None
        """The result; None until it is finished."""
        self.sources: list[TokenSource] = []
        self.token_texts: list[str] | None = [] if request.token_details else None
        self.draft_logprobs: list[float] | None = [] if request.token_details else None
        self._prompt = prompt
        self._text: list[str] = []
        self._resumed_at: set[int] = set()
        """Numbers of tokens at interruptions: several attempts without progress count as one interruption."""

    def begin(self, prompt_text: str, prompt_token_ids: list[int]) -> Piece:
        """Starts the text with the echoed prompt."""
        self._text.append(prompt_text)
        logprobs: list[TokenLogprob] | None = [] if self.logprobs is not None else None
        return Piece([], prompt_text, logprobs, choice=self.choice, prompt_token_ids=prompt_token_ids)

    def take(self, delta: gateway_pb2.GenerateDelta) -> Piece:
        """Adds more tokens or text.

        Raises:
            ProtocolViolationError: log-probabilities are missing.
        """
        tokens = _tokens(delta)
        if self.logprobs is not None:
            if len(tokens) != len(delta.token_ids):
                raise ProtocolViolationError("the gateway leaves out log-probabilities: it may be of an older version")
            self.logprobs += tokens
        self._text.append(delta.text)
        self.token_ids += delta.token_ids
        sources = _sources(delta)
        self.sources += sources
        texts, draft_logprobs = self._take_details(delta)
        return Piece(
            list(delta.token_ids),
            delta.text,
            tokens if self.logprobs is not None else None,
            choice=self.choice,
            sources=sources,
            num_draft_tokens=delta.num_draft_tokens,
            token_texts=texts,
            draft_logprobs=draft_logprobs,
        )

    def _take_details(self, delta: gateway_pb2.GenerateDelta) -> tuple[list[str] | None, list[float] | None]:
        """Adds and returns the text and the draft log-probability of each token; None unless requested.

        Raises:
            ProtocolViolationError: details are missing.
        """
        if self.token_texts is None or self.draft_logprobs is None:
            return None, None
        has_all = len(delta.text_lengths) == len(delta.draft_logprobs) == len(delta.token_ids)
        if not has_all or sum(delta.text_lengths) != len(delta.text):
            raise ProtocolViolationError("the gateway leaves out details of tokens")
        ends = list(accumulate(delta.text_lengths))
        texts = [delta.text[end - length : end] for end, length in zip(ends, delta.text_lengths, strict=True)]
        self.token_texts += texts
        self.draft_logprobs += delta.draft_logprobs
        return texts, list(delta.draft_logprobs)

    def resume(self) -> gateway_pb2.GeneratedChoice | None:
        """Returns the state of this choice for a request that resumes; None if no token was received."""
        if self.completion is not None:
            return gateway_pb2.GeneratedChoice(choice=self.choice, is_finished=True)
        if not self.token_ids:
            return None
        self._resumed_at.add(len(self.token_ids))
        return gateway_pb2.GeneratedChoice(choice=self.choice, token_ids=self.token_ids)

    def finish(self, finish: gateway_pb2.GenerateFinish) -> None:
        """Builds the completion from the finish message.

        Raises:
            ProtocolViolationError: something about the prompt is missing, or the finish reason is unknown.
        """
        if finish.reason not in _FINISH_REASONS:
            raise ProtocolViolationError("the gateway does not say why it finished: it may be of another version")
        self._prompt.check_whole(finish.statistics.num_prompt_tokens)
        self.completion = Completion(
            text="".join(self._text),
            token_ids=self.token_ids,
            finish_reason=_FINISH_REASONS[finish.reason],
            seed=finish.seed,
            rejection_sample_method=finish.rejection_sample_method,
            is_lossy=finish.is_lossy,
            drafter_error=finish.drafter_error,
            statistics=finish.statistics,
            num_resumed=len(self._resumed_at),
            logprobs=self.logprobs,
            sources=self.sources,
            token_texts=self.token_texts,
            draft_logprobs=self.draft_logprobs,
            prompt_logprobs=self._prompt.logprobs,
            choice=self.choice,
            prompt_text=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
        )


def _sources(delta: gateway_pb2.GenerateDelta) -> list[TokenSource]:
    """Returns the sources of a delta's tokens.

    Raises:
        ProtocolViolationError: a source is missing or unknown.
    """
    known = [_SOURCES[source] for source in delta.token_sources if source in _SOURCES]
    if len(known) != len(delta.token_ids):
        raise ProtocolViolationError("the gateway does not say where tokens came from: it may be of an older version")
    return known


def _tokens(message: gateway_pb2.GenerateDelta | gateway_pb2.PromptLogprobs) -> list[TokenLogprob]:
    """Returns the log-probabilities of a message's tokens; empty if the message has none.

    Raises:
        ProtocolViolationError: the log-probabilities do not fit the tokens, or are not valid numbers.
    """
    top = message.top_logprobs
    packed = PackedTop(top.num_top, top.token_ids, top.logprobs) if message.HasField("top_logprobs") else None
    try:
        return unpack_top(message.token_ids, message.logprobs, packed)
    except InvalidRequestError as error:
        raise ProtocolViolationError(f"the gateway sends no log-probabilities: {error}") from error
