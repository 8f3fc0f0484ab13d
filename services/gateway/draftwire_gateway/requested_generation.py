"""Validation of requests, and completion with the server's defaults."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from draftwire.errors import ContextLengthError, InvalidRequestError
from draftwire.method.confidence import check_stop
from draftwire.method.keys import MAX_SEED, new_seed
from draftwire.method.tree_limits import MAX_TREE_NODES
from draftwire.models.description import ModelDescription
from draftwire.options.model_free.names import parts_of
from draftwire.requests.logprobs import LogprobsMode, LogprobsRequest
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.rules import RuleFacts
from draftwire.requests.session_parameters import check_salt
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.speculation.predicting_chooser import LONGEST

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_DRAFTERS = 16
MAX_CHOICES = 128
"""Completions of one request, over all its prompts."""
SALT_BYTES = 16
"""Size of the salts that peers get."""


@dataclass(frozen=True, slots=True)
class SpeculationDefaults:
    """Defaults of speculation parameters that a request leaves out."""

    num_speculative_tokens: int
    max_speculative_tokens: int
    rule: str
    adapts_length: bool = False
    """Whether lengths are chosen where none is requested and the random numbers are fresh."""
    local_strategies: tuple[str, ...] = ()
    """Strategies by which a verifier drafts by itself where no drafter does, if it can."""
    drafter_names: Callable[[], tuple[str, ...]] = tuple
    """Returns what requests may ask for as `drafter`."""
    rounds_ahead: int = 0
    """Rounds for which drafters may draft before their text is known."""
    max_branches: int = 0
    """Texts for which they may do so at once."""
    num_draft_nodes: int = 0
    """Draft tokens of a token tree, where the rule takes trees; 0 drafts chains."""
    stop_below: float = 0.0
    """How sure drafters have to be of each place; 0 ends no block."""


@dataclass(frozen=True, slots=True)
class GeneratedChoice:
    """Tokens of one choice that were generated before the request was interrupted."""

    choice: int
    token_ids: tuple[int, ...] = ()
    is_finished: bool = False
    """Whether the choice was complete: it is not generated or sent again."""


@dataclass(frozen=True, slots=True)
class RequestedGeneration:
    """A request before validation; None stands for parameters that were left out."""

    prompts: list[list[int]]
    """Token ids of each prompt."""
    sampling: SamplingParams
    caller: str
    """Name of the caller's token; empty without tokens. Computed prefixes are shared only within one caller."""
    num_choices: int | None = None
    """Completions of each prompt."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    num_speculative_tokens: int | None = None
    num_draft_nodes: int | None = None
    stop_below: float | None = None
    drafter: tuple[str, ...] = ()
    """Names of draft models or of strategies of the verifier, that may draft; empty for all."""
    rule: str | None = None
    cache_salt: str = ""
    generated_choices: tuple[GeneratedChoice, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None
    echo: bool = False
    token_details: bool = False
    shown_tokens: frozenset[str] = frozenset()
    """Special tokens that have text in the completions."""

    @property
    def num_ids(self) -> int:
        """Total number of token ids."""
        return sum(map(len, self.prompts)) + sum(len(generated.token_ids) for generated in self.generated_choices)


def complete_request(
    request: RequestedGeneration, target: ModelDescription, defaults: SpeculationDefaults
) -> list[Generation]:
    """Checks a request against the target and fills in the defaults.

    Returns:
        The choices to run, in their order, without those that were complete before.

    Raises:
        InvalidRequestError: a value is out of range; the message names the parameter and its range.
    """
    num_choices = check_num_choices(len(request.prompts), request.num_choices)
    stop_token_ids = _stop_token_ids(request, target)
    request.sampling.check_vocabulary(target.vocab_size)
    seed = new_seed() if request.seed is None else request.seed
    if not 0 <= seed <= MAX_SEED:
        raise InvalidRequestError(f"seed must be in 0..{MAX_SEED}")
    check_salt(request.cache_salt)
    num_speculative_tokens = _num_speculative_tokens(request, defaults)
    rule = target.rule_named(request.rule if request.rule is not None else defaults.rule)
    num_draft_nodes = _num_draft_nodes(request, defaults, rule, target) if num_speculative_tokens else 0
    rounds_ahead = 0 if num_draft_nodes else defaults.rounds_ahead
    stop_below = check_stop(request.stop_below)
    draft_models, strategies = _drafters(request, defaults)
    template = Generation(
        prompt_ids=[],
        sampling=request.sampling,
        max_tokens=0,
        stop=request.stop,
        stop_token_ids=stop_token_ids,
        seed=seed,
        has_own_seed=request.seed is not None,
        num_speculative_tokens=num_speculative_tokens,
        draft_models=draft_models,
        local_strategies=strategies,
        rounds_ahead=rounds_ahead,
        max_branches=defaults.max_branches if rounds_ahead else 0,
        num_draft_nodes=num_draft_nodes,
        stop_below=defaults.stop_below if stop_below is None else stop_below,
        rule=rule,
        cache_salt=_salt_of(request),
        logprobs=_wanted_logprobs(request),
        token_details=request.token_details,
        shown_tokens=request.shown_tokens,
    )
    if defaults.adapts_length and request.num_speculative_tokens is None:
        template = _adapting(template, defaults)
    before = _generated_by_choice(request, len(request.prompts) * num_choices)
    generations: list[Generation] = []
    for index, prompt_ids in enumerate(request.prompts):
        name = "the prompt" if len(request.prompts) == 1 else f"prompt {index}"
        prompt = replace(
            template,
            prompt_ids=prompt_ids,
            prompt_index=index,
            max_tokens=_max_tokens(request, prompt_ids, name, target),
        )
        for choice in range(index * num_choices, (index + 1) * num_choices):
            generated = before.get(choice, GeneratedChoice(choice))
            _check_generated(generated, prompt, target)
            if generated.is_finished:
                continue
            reports_prompt = choice == index * num_choices and not generated.token_ids
            logprobs = prompt.logprobs if reports_prompt else replace(prompt.logprobs, prompt_logprobs=None)
            echo = request.echo and reports_prompt
            generations.append(
                replace(prompt, choice=choice, generated_ids=generated.token_ids, logprobs=logprobs, echo=echo)
            )
    return generations


def _salt_of(request: RequestedGeneration) -> str:
    """Returns a salt that no other caller has, whatever it asks for; empty without a caller's name and a salt."""
    if not request.caller and not request.cache_salt:
        return ""
    digest = hashlib.blake2b(request.cache_salt.encode("utf-8", "surrogatepass"), digest_size=SALT_BYTES)
    digest.update(b"\0" + request.caller.encode())
    return digest.hexdigest()


def check_num_choices(num_prompts: int, num_choices: int | None) -> int:
    """Returns the number of choices per prompt, by default 1.

    Raises:
        InvalidRequestError: the number of prompts or choices is 0 or too large.
    """
    if num_prompts < 1:
        raise InvalidRequestError("prompts is empty")
    most = MAX_CHOICES // num_prompts
    if most == 0:
        raise InvalidRequestError(f"prompts takes at most {MAX_CHOICES}, not {num_prompts}")
    num_choices = 1 if num_choices is None else num_choices
    if not 1 <= num_choices <= most:
        raise InvalidRequestError(
            f"num_choices must be in 1..{most}, such that all prompts together have at most {MAX_CHOICES}, "
            f"not {num_choices}"
        )
    return num_choices


def _max_tokens(request: RequestedGeneration, prompt_ids: list[int], name: str, target: ModelDescription) -> int:
    """Checks a prompt, and returns the largest number of tokens to generate after it."""
    prompt_len = len(prompt_ids)
    if prompt_len == 0:
        raise InvalidRequestError(f"{name} is empty")
    if prompt_len >= target.context_length:
        raise ContextLengthError.of(
            target.context_length, f"{name} has {prompt_len} tokens, and room for one more is needed"
        )
    if not _are_ids(prompt_ids, target):
        raise InvalidRequestError(f"token ids of {name} must be in 0..{target.vocab_size - 1}")
    room = target.context_length - prompt_len
    max_tokens = room if request.max_tokens is None else request.max_tokens
    if max_tokens < 0:
        raise InvalidRequestError(f"max_tokens must not be negative, as {max_tokens} is")
    if max_tokens > room:
        raise ContextLengthError.of(
            target.context_length,
            f"max_tokens must be in 0..{room}, what the {prompt_len} tokens of {name} leave, not {max_tokens}",
        )
    if not request.sampling.min_tokens <= max_tokens:
        raise InvalidRequestError(f"min_tokens must be at most max_tokens, {max_tokens}")
    return max_tokens


def _stop_token_ids(request: RequestedGeneration, target: ModelDescription) -> frozenset[int]:
    """Checks stop strings and stop tokens, and returns the stop tokens."""
    if len(request.stop) > MAX_STOP_STRINGS or any(not 1 <= len(stop) <= MAX_STOP_LENGTH for stop in request.stop):
        raise InvalidRequestError(
            f"stop takes at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters each"
        )
    if not _are_ids(request.stop_token_ids, target):
        raise InvalidRequestError(f"stop_token_ids must be in 0..{target.vocab_size - 1}")
    if request.ignore_eos and request.sampling.structured_output is not None:
        raise InvalidRequestError("ignore_eos and structured_output: a stop token is what ends a text of that form")
    own = () if request.ignore_eos else target.stop_token_ids
    stop_token_ids = frozenset(request.stop_token_ids) | frozenset(own)
    allowed = request.sampling.allowed_token_ids
    possible = range(target.vocab_size) if allowed is None else allowed
    are_many = len(stop_token_ids) >= len(possible)  # else the possible tokens need not be looked through
    if request.sampling.min_tokens and are_many and stop_token_ids.issuperset(possible):
        name = "stop_token_ids" if allowed is None else "allowed_token_ids"
        raise InvalidRequestError(f"{name}: all possible tokens are stop tokens, which min_tokens keeps away")
    return stop_token_ids


def _num_speculative_tokens(request: RequestedGeneration, defaults: SpeculationDefaults) -> int:
    speculative = request.num_speculative_tokens
    if speculative is None:
        speculative = defaults.num_speculative_tokens
    if not 0 <= speculative <= defaults.max_speculative_tokens:
        raise InvalidRequestError(
            f"num_speculative_tokens must be in 0..{defaults.max_speculative_tokens}, not {speculative}"
        )
    return 0 if request.max_tokens == 0 else speculative


def _num_draft_nodes(
    request: RequestedGeneration, defaults: SpeculationDefaults, rule: RuleFacts, target: ModelDescription
) -> int:
    """Returns how many tokens trees have that somebody asked for; 0 drafts chains, as where nobody did and the rule
    takes none, or where the target takes none: lengths are chosen then, and rounds drafted ahead, as without trees.
    """
    takes_trees = rule.takes_trees or request.sampling.greedy
    wanted = request.num_draft_nodes
    if wanted is None:
        return defaults.num_draft_nodes if takes_trees and target.max_tree_nodes else 0
    if not 0 <= wanted <= MAX_TREE_NODES:
        raise InvalidRequestError(f"num_draft_nodes must be in 0..{MAX_TREE_NODES}, not {wanted}")
    if wanted and not takes_trees:
        raise InvalidRequestError(f"num_draft_nodes: rule {rule.name} takes no token trees but at temperature 0")
    return wanted if target.max_tree_nodes else 0


def _adapting(generation: Generation, defaults: SpeculationDefaults) -> Generation:
    """Returns a generation whose lengths are chosen; as it is where nothing may be chosen, as with trees."""
    # Decided once, for the first epoch of the first attempt: what a later one repeats was drawn by a verifier whose
    # verdict did not come, so that nothing that chooses has seen it.
    if not generation.num_speculative_tokens or generation.num_draft_nodes or not generation.numbers_are_fresh():
        return generation
    most = min(LONGEST, defaults.max_speculative_tokens)
    return replace(generation, adapts_length=True, num_speculative_tokens=most)


def _drafters(
    request: RequestedGeneration, defaults: SpeculationDefaults
) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """Returns the draft models, and the strategies of the verifier, that may draft."""
    if not request.drafter:
        return None, defaults.local_strategies
    known = defaults.drafter_names()
    parts = [part for name in request.drafter for part in ([name] if name in known else parts_of(name))]
    unknown = next((part for part in parts if part not in known), None)
    if unknown is not None:
        raise InvalidRequestError(f"drafter: nothing drafts by the name {unknown!r}; there are {', '.join(known)}")
    return frozenset(parts), tuple(dict.fromkeys(parts))  # of these, a verifier drafts by those that it has


def _generated_by_choice(request: RequestedGeneration, num_choices: int) -> dict[int, GeneratedChoice]:
    """Returns the choices that were begun before an interruption, by index."""
    before = {generated.choice: generated for generated in request.generated_choices}
    if len(before) < len(request.generated_choices):
        raise InvalidRequestError("generated_choices names a choice twice")
    if not all(0 <= choice < num_choices for choice in before):
        raise InvalidRequestError(f"generated_choices: a choice must be in 0..{num_choices - 1}")
    return before


def _check_generated(generated: GeneratedChoice, prompt: Generation, target: ModelDescription) -> None:
    """Refuses generated tokens that this prompt's choice cannot have had."""
    if len(generated.token_ids) > prompt.max_tokens:
        raise InvalidRequestError(
            f"generated_choices has {len(generated.token_ids)} ids of choice {generated.choice}, more than max_tokens, "
            f"{prompt.max_tokens}"
        )
    if not _are_ids(generated.token_ids, target):
        raise InvalidRequestError(f"token ids of generated_choices must be in 0..{target.vocab_size - 1}")
    if not prompt.stop_token_ids.isdisjoint(generated.token_ids[:-1]):
        raise InvalidRequestError(f"generated_choices: choice {generated.choice} goes on after a stop token")


def _are_ids(token_ids: Sequence[int], target: ModelDescription) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < target.vocab_size)


def _wanted_logprobs(request: RequestedGeneration) -> LogprobsRequest:
    mode = LogprobsMode.RAW if request.logprobs_mode is None else LogprobsMode.named(request.logprobs_mode)
    wanted = LogprobsRequest(request.logprobs, request.prompt_logprobs, mode)
    if request.logprobs_mode is not None and wanted.logprobs is None and wanted.prompt_logprobs is None:
        raise InvalidRequestError("logprobs_mode says nothing without logprobs or prompt_logprobs")
    return wanted
