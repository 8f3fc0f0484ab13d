"""One choice of a validated request: all that its session reads of it."""

from dataclasses import dataclass

from draftwire.requests.logprobs import NO_LOGPROBS, LogprobsRequest
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.rules import RuleFacts


@dataclass(frozen=True, slots=True)
class Generation:
    """One choice of a validated request."""

    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    """The request's stop tokens and, without `ignore_eos`, the model's."""
    seed: int
    """The same for all choices of a request: their random numbers differ by `choice`."""
    num_speculative_tokens: int
    """Draft tokens per round, of a token tree on each path; with `adapts_length`, the most of them."""
    rule: RuleFacts
    cache_salt: str = ""
    generated_ids: tuple[int, ...] = ()
    """Tokens that were generated before an interruption; they count in `max_tokens`."""
    logprobs: LogprobsRequest = NO_LOGPROBS
    """Those of the prompt are requested only by its first choice."""
    choice: int = 0
    """Index of the choice in the request."""
    prompt_index: int = 0
    """Index of the prompt in the request."""
    echo: bool = False
    """Whether the prompt is sent back; true only for the first choice of each prompt."""
    token_details: bool = False
    """Whether the text and the drafter's log-probability of each token are reported."""
    form_memory_bytes: int = 0
    """Memory that compiling the structured output took; 0 without one."""
    form_caller: str = ""
    """Caller whose budget pays for its masks, if they take long; see `payer`."""
    adapts_length: bool = False
    """Whether the length of each draft is chosen from what is measured; never of token trees."""
    draft_models: frozenset[str] | None = None
    """Names of the models whose drafters may draft; None for all."""
    local_strategies: tuple[str, ...] = ()
    """Strategies by which the verifier drafts by itself where no drafter does, if it can."""
    rounds_ahead: int = 0
    """Rounds for which a drafter may draft before their text is known."""
    max_branches: int = 0
    """Texts for which it may do so at once."""
    num_draft_nodes: int = 0
    """Draft tokens of a token tree, in the place of a chain, where drafter and verifier know trees. 0 drafts chains."""
    stop_below: float = 0.0
    """How sure drafters have to be of a place: blocks end before one of less; 0 ends none."""
    has_own_seed: bool = False
    """Whether the request named the seed, and so may be one of several with equal numbers. See `numbers_are_fresh`."""
    shown_tokens: frozenset[str] = frozenset()
    """Special tokens that have text."""
    is_retried: bool = False
    """Whether an attempt before, of which nothing came, may have drawn some of its random numbers."""

    def numbers_are_fresh(self, epoch: int = 0) -> bool:
        """Returns whether no random number that decides the text can have been drawn before: after the first epoch of a
        session, the round that was open is repeated under its own numbers.

        Only then may what other texts show draft, or choose how much is drafted, for this one, and what this one shows
        for others: a guess made of what equal numbers drew is right too often, and a length that was chosen by it
        depends on the very numbers that decide. True also where none is drawn that could be biased: at temperature 0,
        and under a coupled rule, whose tokens do not depend on what is drafted.
        """
        is_sampled = not (self.sampling.greedy or self.rule.is_coupled)
        return not (is_sampled and (self.has_own_seed or self.is_retried or epoch > 0))

    @property
    def is_lossy(self) -> bool:
        """Whether the rule changes the distribution of the text."""
        return not self.rule.is_lossless

    @property
    def max_len(self) -> int:
        """Most tokens of prompt and completion together. A verifier emits at least one token, shown or not."""
        return len(self.prompt_ids) + max(1, self.max_tokens)
