"""`draftwire bench --explain`: what a gateway chooses the lengths of drafts by, and what would change the choice.

Explanations are messages of `draftwire/v1/gateway.proto`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from draftwire.cli.colors import visible

if TYPE_CHECKING:
    from rich.console import Console

AFTER = ", each after the one before"
LEAST_SHOWN = 0.005
"""Smaller shares would be shown as 0 %."""
STEPS = 40
"""Halvings in the search for a break-even point."""


def explanation_fields(explanation: Any) -> dict[str, Any]:
    """Returns an `ExplainSpeculationResponse` as JSON values."""
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(explanation, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def print_explanation(console: "Console", explanation: Any, concurrency: int) -> None:
    """Prints the explanation of each pair at the load of so many sessions."""
    console.print()
    if not explanation.is_adaptive:
        console.print("the server does not choose lengths: it is configured with speculation=fixed", soft_wrap=True)
    elif not explanation.choices:
        console.print(
            "nothing was chosen yet: requests with a number are not chosen for, nor those whose text depends on a seed "
            "and on drafts",
            soft_wrap=True,
        )
    for choice, load in _at_load(explanation, concurrency):
        _print_choice(console, choice, load)


def why_slower(options: Mapping[str, Any], explanation: Any, concurrency: int) -> str:
    """Returns one line on why speculation was slower than plain decoding, and what to try."""
    if options["num_speculative_tokens"] is not None:
        rounds = f"{options['num_speculative_tokens']} draft tokens a round cost more here than they save"
        return f"{rounds}: without --num-speculative-tokens the server chooses how many"
    if options["seed"] is not None and options["temperature"] != 0 and options["rejection_sample_method"] != "coupled":
        return (
            "above temperature 0, and under other rules than coupled, requests with a seed have drafts of a fixed "
            "length: without --seed the server chooses how long"
        )
    if not explanation.is_adaptive:
        return (
            "drafts cost more here than they save, and the server does not choose: start it with speculation=adaptive"
        )
    chosen = [load for _, load in _at_load(explanation, concurrency)]
    if chosen and not any(load.num_draft_tokens for load in chosen):
        return (
            "the server found that drafts do not pay here, and tries them now and then: --explain says what would pay"
        )
    return "the server may still have been finding out what pays: try --runs 10, or --explain"


def _at_load(explanation: Any, concurrency: int) -> Iterator[tuple[Any, Any]]:
    """Yields each choice with the load nearest to so many sessions, of those at which something was measured."""
    for choice in explanation.choices:
        measured = [load for load in choice.loads if load.estimates and not _has_no_trees(choice, load)]
        if measured:
            yield (
                choice,
                min(measured, key=lambda load: max(load.min_sessions - concurrency, concurrency - load.max_sessions)),
            )


def _has_no_trees(choice: Any, load: Any) -> bool:
    """Whether a drafter of token trees has none that was measured: of others nothing is predicted."""
    return not choice.survival and len(load.estimates) == 1


def _print_choice(console: "Console", choice: Any, load: Any) -> None:
    from draftwire.cli.console import make_table

    pair = visible(f"{choice.drafter} {'at' if choice.is_local else 'for'} {choice.verifier}")
    if choice.beside:
        pair += visible(f", beside {choice.beside}")
    sessions = "one session" if load.max_sessions == 1 else f"{load.min_sessions} to {load.max_sessions} sessions"
    console.print(f"lengths of drafts by {pair}, {sessions} at a time", soft_wrap=True, markup=False)
    table = make_table(("length", "tokens/round", "ms/round", "tokens/s of a session", "accepted", "known from"))
    survival, is_chosen = [1.0, *choice.survival], load.chosen in ("", choice.drafter)
    for estimate in load.estimates:
        windows = estimate.num_windows
        length = estimate.num_draft_tokens
        is_best = (length, estimate.num_draft_nodes) == (load.num_draft_tokens, load.num_draft_nodes)
        table.add_row(
            f"{'* ' if is_chosen and is_best else ''}{_size(estimate)}",
            f"{estimate.tokens_per_round:.2f}",
            f"{1e3 * estimate.round_s:.2f}",
            f"{rate_of(estimate):.1f}",
            f"{survival[length]:.3f}" if length and choice.survival else "-",
            f"{windows} windows" if windows else "the others",
        )
    console.print(table)
    for line in reasons(choice, load):
        console.print(line, soft_wrap=True, markup=False)


def reasons(choice: Any, load: Any) -> Iterator[str]:
    """Yields sentences on prices, on whether drafting pays, and on what would change that."""
    plain, *drafts = load.estimates
    yield (
        f"prices: a plain round {_ms(plain.round_s)}, a draft token {_ms(load.draft_token_s)}, "
        f"a row of the verifier {_ms(load.row_s)}; acceptance from {choice.num_drafts} drafts"
    )
    if not drafts:
        return
    fastest, best = max(drafts, key=rate_of), load.num_draft_tokens
    if not choice.survival:  # trees, of which nothing more is predicted
        yield _verdict(choice, load, fastest, pays=bool(load.chosen))
        return
    if load.chosen not in ("", choice.drafter):
        yield _verdict(choice, load, load.estimates[best], pays=True)
        return
    yield _verdict(choice, load, load.estimates[best] if best else fastest, pays=best > 0)
    edge, drafting = break_even_acceptance(load), fastest.num_draft_tokens
    if edge is not None and (edge >= LEAST_SHOWN or not best):
        wanted = f"it would not if less than {edge:.0%}" if best else f"it would if {edge:.0%}"
        acceptance = mean_acceptance(choice.survival[:drafting])
        yield f"{wanted} of the tokens were accepted{AFTER}; now {acceptance:.0%}"
    token_s = None if best else break_even_token_s(load, drafting)
    if token_s is not None:
        yield f"or if a draft token took {_ms(token_s)}; now {_ms(load.draft_token_s)}"


def _verdict(choice: Any, load: Any, estimate: Any, pays: bool) -> str:
    """Returns whether drafts of the estimate's size pay, or who drafts in the place of their drafter."""
    size, ratio = _size(estimate), f"{rate_of(estimate) / rate_of(load.estimates[0]):.2f}"
    if load.chosen not in ("", choice.drafter):
        return (
            f"{load.chosen} drafts: it is faster than {size} tokens of {choice.drafter}, {ratio} times plain decoding"
        )
    verdict = "drafting pays" if pays else "drafting does not pay"
    return f"{verdict}: {size} tokens make {ratio} times the tokens/s of plain decoding"


def _size(estimate: Any) -> str:
    """Returns the length of a chain, or how many nodes a tree has, and how deep it is."""
    length = estimate.num_draft_tokens
    return f"{estimate.num_draft_nodes} in {length}" if estimate.num_draft_nodes else str(length)


def rate_of(estimate: Any) -> float:
    """Returns what is expected of each session, tokens per second."""
    return float(estimate.tokens_per_round) / session_s(estimate)


def session_s(estimate: Any) -> float:
    """Returns what a session takes for a round, with its share of prompts and waits, seconds."""
    return float(estimate.round_s) / (estimate.session_share or 1.0)


def mean_acceptance(survival: Sequence[float]) -> float:
    """Returns the geometric mean of the shares of tokens that are accepted, each after the one before."""
    return float(max(0.0, survival[-1]) ** (1.0 / len(survival))) if survival else 0.0


def break_even_acceptance(load: Any) -> float | None:
    """Returns the share of tokens, equal at all positions, with which the best draft is as fast as plain decoding; None
    if even 1 is too little.
    """
    plain_s, *drafting_s = [session_s(estimate) for estimate in load.estimates]

    def gain(rate: float) -> float:
        tokens = list(accumulate(rate**length for length in range(len(load.estimates))))[1:]
        return max(count / round_s for count, round_s in zip(tokens, drafting_s, strict=True)) - 1.0 / plain_s

    return _root(gain, 0.0, 1.0)


def break_even_token_s(load: Any, length: int) -> float | None:
    """Returns the time of a draft token with which drafts of a length are as fast as plain decoding, seconds; None if
    even 0 is too much.
    """
    estimate = load.estimates[length]
    allowed_s = estimate.tokens_per_round * session_s(load.estimates[0]) * (estimate.session_share or 1.0)
    spare_s: float = allowed_s - (estimate.round_s - length * load.draft_token_s)
    return spare_s / length if spare_s > 0.0 else None


def _root(gain: Callable[[float], float], low: float, high: float) -> float | None:
    """Returns where an increasing function becomes positive; None if it does not."""
    if gain(high) <= 0.0:
        return None
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) > 0.0 else (middle, high)
    return high


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
