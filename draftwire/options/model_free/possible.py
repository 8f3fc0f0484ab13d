"""Cuts guesses down to what a request allows."""

from collections.abc import Sequence

from draftwire.errors import InvalidRequestError
from draftwire.requests.automaton import Automaton
from draftwire.requests.parameters import SamplingParams


def possible(
    guessed: list[int],
    num_generated: int,
    sampling: SamplingParams,
    stop_token_ids: frozenset[int],
    vocab_size: int,
) -> list[int]:
    """Returns the guessed tokens before the first that the target cannot draw, as far as is known.

    A guess is no draw: it may end before any token, since it is a function of the committed ones.

    Args:
        guessed: the tokens, of which any may be beyond the vocabulary.
        num_generated: how many tokens were generated before them.
        sampling: of the request.
        stop_token_ids: those that `min_tokens` masks.
        vocab_size: of the target.
    """
    num_barred = sampling.min_tokens - num_generated  # stop tokens are masked in so many places
    for index, token in enumerate(guessed):
        if token >= vocab_size or (index < num_barred and token in stop_token_ids):
            return guessed[:index]
        if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
            return guessed[:index]
    return guessed


def following(guessed: list[int], generated: Sequence[int], automaton: Automaton) -> list[int]:
    """Returns the guessed tokens before the first that a form does not allow after the generated ones.

    Takes as long as the form's masks do. On the thread that owns the automaton.
    """
    try:
        masks = automaton.masks(generated, guessed)
    except InvalidRequestError:  # the form may need tokens that are not in this vocabulary
        return []
    for index, (token, mask) in enumerate(zip(guessed, masks, strict=False)):
        if token >> 3 >= len(mask) or not mask[token >> 3] >> (token & 7) & 1:
            return guessed[:index]
    return guessed
