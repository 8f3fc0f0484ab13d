"""What a user asks for, checked and completed with the server's defaults."""

from dataclasses import dataclass, replace

from draftwire.errors import InvalidRequestError
from draftwire.logprobs import NO_LOGPROBS, LogprobsMode, LogprobsRequest
from draftwire.models.description import ModelDescription
from draftwire.randomness import MAX_SEED, new_seed
from draftwire.rounds import MAX_SALT_LENGTH
from draftwire.sampling import SamplingParams
from draftwire.verification import rule_named

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256


@dataclass(frozen=True, slots=True)
class SpeculationDefaults:
    """What a request gets that does not say."""

    num_speculative_tokens: int
    max_speculative_tokens: int
    rule: str


@dataclass(frozen=True, slots=True)
class RequestedGeneration:
    """A request as it arrived; None is what the user left out."""

    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    num_speculative_tokens: int | None = None
    rule: str | None = None
    cache_salt: str = ""
    generated_ids: tuple[int, ...] = ()
    """What was generated before the completion was interrupted."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that can be carried out."""

    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    """The request's and the model's."""
    seed: int
    num_speculative_tokens: int
    rule: str
    cache_salt: str = ""
    generated_ids: tuple[int, ...] = ()
    """What was generated before; counts in `max_tokens`."""
    logprobs: LogprobsRequest = NO_LOGPROBS

    @property
    def is_lossy(self) -> bool:
        """Whether the rule changes the distribution of the text."""
        return not rule_named(self.rule).is_lossless

    @property
    def max_len(self) -> int:
        """Most tokens of prompt and completion together."""
        return len(self.prompt_ids) + self.max_tokens


def complete_request(
    request: RequestedGeneration, target: ModelDescription, defaults: SpeculationDefaults
) -> Generation:
    """Checks a request against the target and fills in the defaults.

    Raises:
        InvalidRequestError: a value is out of range; the message names it and its range.
    """
    prompt_len = len(request.prompt_ids)
    if prompt_len == 0:
        raise InvalidRequestError("the prompt is empty")
    if prompt_len >= target.context_length:
        raise InvalidRequestError(
            f"the prompt has {prompt_len} tokens; the context of {target.name} is {target.context_length} tokens, "
            "and at least one is generated"
        )
    if not all(0 <= token < target.vocab_size for token in request.prompt_ids):
        raise InvalidRequestError(f"prompt token ids must be in 0..{target.vocab_size - 1}")
    room = target.context_length - prompt_len
    max_tokens = room if request.max_tokens is None else request.max_tokens
    if not 1 <= max_tokens <= room:
        raise InvalidRequestError(
            f"max_tokens must be in 1..{room}, what the prompt's {prompt_len} tokens leave of the context, "
            f"not {max_tokens}"
        )
    if len(request.stop) > MAX_STOP_STRINGS or any(not 1 <= len(stop) <= MAX_STOP_LENGTH for stop in request.stop):
        raise InvalidRequestError(
            f"stop takes at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters each"
        )
    if len(request.generated_ids) > max_tokens:
        raise InvalidRequestError(
            f"generated_token_ids has {len(request.generated_ids)} ids, more than max_tokens, {max_tokens}"
        )
    if not all(0 <= token < target.vocab_size for token in request.generated_ids):
        raise InvalidRequestError(f"generated_token_ids must be in 0..{target.vocab_size - 1}")
    request.sampling.check_vocabulary(target.vocab_size)
    if not request.sampling.min_tokens <= max_tokens:
        raise InvalidRequestError(f"min_tokens must be at most max_tokens, {max_tokens}")
    if not all(0 <= token < target.vocab_size for token in request.stop_token_ids):
        raise InvalidRequestError(f"stop_token_ids must be in 0..{target.vocab_size - 1}")
    stop_token_ids = frozenset(request.stop_token_ids) | frozenset(target.stop_token_ids)
    if not stop_token_ids.isdisjoint(request.generated_ids[:-1]):
        raise InvalidRequestError("generated_token_ids go on after a stop token")
    allowed = request.sampling.allowed_token_ids
    possible = range(target.vocab_size) if allowed is None else allowed
    if request.sampling.min_tokens and stop_token_ids.issuperset(possible):
        name = "stop_token_ids" if allowed is None else "allowed_token_ids"
        raise InvalidRequestError(f"{name}: all possible tokens are stop tokens, which min_tokens keeps away")
    seed = new_seed() if request.seed is None else request.seed
    if not 0 <= seed <= MAX_SEED:
        raise InvalidRequestError(f"seed must be in 0..{MAX_SEED}")
    speculative = request.num_speculative_tokens
    if speculative is None:
        speculative = defaults.num_speculative_tokens
    if not 0 <= speculative <= defaults.max_speculative_tokens:
        raise InvalidRequestError(
            f"num_speculative_tokens must be in 0..{defaults.max_speculative_tokens}, not {speculative}"
        )
    if len(request.cache_salt) > MAX_SALT_LENGTH:
        raise InvalidRequestError(f"cache_salt has at most {MAX_SALT_LENGTH} characters")
    rule = rule_named(request.rule if request.rule is not None else defaults.rule).name
    return Generation(
        prompt_ids=request.prompt_ids,
        sampling=request.sampling,
        max_tokens=max_tokens,
        stop=request.stop,
        stop_token_ids=stop_token_ids,
        seed=seed,
        num_speculative_tokens=speculative,
        rule=rule,
        cache_salt=request.cache_salt,
        generated_ids=request.generated_ids,
        logprobs=_wanted_logprobs(request),
    )


def _wanted_logprobs(request: RequestedGeneration) -> LogprobsRequest:
    """Returns what is to be reported: of a resumed completion not the prompt, which was reported before its tokens."""
    mode = LogprobsMode.RAW if request.logprobs_mode is None else LogprobsMode.named(request.logprobs_mode)
    wanted = LogprobsRequest(request.logprobs, request.prompt_logprobs, mode)
    if request.logprobs_mode is not None and wanted.logprobs is None and wanted.prompt_logprobs is None:
        raise InvalidRequestError("logprobs_mode says nothing without logprobs or prompt_logprobs")
    return replace(wanted, prompt_logprobs=None) if request.generated_ids else wanted
