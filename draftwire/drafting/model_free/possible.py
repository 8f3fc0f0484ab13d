"""What of a guess a request allows."""

from collections.abc import Sequence

from draftwire.errors import InvalidRequestError
from draftwire.requests.automaton import Automaton
from draftwire.requests.parameters import SamplingParams


def possible(
    guessed: list[int],
    generated: Sequence[int],
    sampling: SamplingParams,
    stop_token_ids: frozenset[int],
    automaton: Automaton | None,
    vocab_size: int,
) -> list[int]:
    """Returns the guessed tokens before the first that the target cannot draw, as far as is known.

    A guess is no draw: it may end before any token, since it is a function of the committed ones.

    Args:
        guessed: the tokens, of which any may be beyond the vocabulary.
        generated: the generated tokens before them.
        sampling: of the request.
        stop_token_ids: those that `min_tokens` masks.
        automaton: of the request's structured output; None if it has none.
        vocab_size: of the target.
    """
    num_barred = sampling.min_tokens - len(generated)  # stop tokens are masked in so many places
    for index, token in enumerate(guessed):
        if token >= vocab_size or (index < num_barred and token in stop_token_ids):
            return guessed[:index]
        if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
            return guessed[:index]
        if automaton is not None and not _follows(automaton, generated, guessed[:index], token):
            return guessed[:index]
    return guessed


def _follows(automaton: Automaton, generated: Sequence[int], guessed: list[int], token: int) -> bool:
    try:
        mask = automaton.last_mask(generated, guessed)[0]
    except InvalidRequestError:  # the form may need tokens that are not in this vocabulary
        return False
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
