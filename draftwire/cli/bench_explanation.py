"""`draftwire bench --explain`: what each way to draft would make, and why the chosen one is best.

Explanations are messages of `draftwire/v1/gateway.proto`.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from draftwire.cli.colors import visible

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = (
    "way",
    "tokens/\nround",
    "\naccepted",
    "ms/\nround",
    "\nverify",
    "\ndraft",
    "\nbetween",
    "\ntokens/s",
    "\nmade",
    "\nrounds",
)
LEGEND = (
    "ms/round: the verifier's step, drafting, and what lies between; tokens/s: of each session, with waits; made: what "
    "sessions made of what rounds promise, where some were measured lately"
)


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
        console.print(LEGEND, soft_wrap=True)
        console.print(reason(choice, load, explanation.least_gain), soft_wrap=True, markup=False)


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
            "the server found that drafts do not pay here, and tries them now and then: --explain says what each way "
            "would make"
        )
    return "the server may still have been finding out what pays: try --runs 10, or --explain"


def reason(choice: Any, load: Any, least_gain: float) -> str:
    """Returns one sentence on why a way is chosen at a load, and on what may take its place."""
    plain, *_ = load.estimates
    chosen = next((way for way in load.estimates if _is_chosen(load, way)), plain)
    other = max((way for way in load.estimates if way is not chosen), key=rate_of)
    text = f"{_name(choice, chosen)}: {rate_of(chosen):.3g} tokens/s expected"
    if chosen is not plain:
        text += f", {_compared(chosen, plain)} than plain decoding"
    if rate_of(other) > (1.0 + least_gain) * rate_of(chosen):
        then = "and may be chosen next" if other.num_rounds else "which has to be tried first"
        text += f"; {_name(choice, other)} would make {_compared(other, chosen)}, {then}"
    elif chosen is plain:
        text += f"; {_name(choice, other)} would make {_compared(other, plain)}, and must be better by {least_gain:.0%}"
    else:
        text += f"; another way must be better by {least_gain:.0%}"
    return text.replace("%", " %")


def rate_of(way: Any) -> float:
    """Returns what is expected of each session, tokens per second."""
    return float(way.session_share * way.tokens_per_round / way.round_s)


def _at_load(explanation: Any, concurrency: int) -> Iterator[tuple[Any, Any]]:
    """Yields each choice with the load nearest to so many sessions, of those at which something was measured."""
    for choice in explanation.choices:
        measured = [load for load in choice.loads if load.estimates]
        if measured:
            yield (
                choice,
                min(measured, key=lambda load: max(load.min_sessions - concurrency, concurrency - load.max_sessions)),
            )


def _print_choice(console: "Console", choice: Any, load: Any) -> None:
    from draftwire.cli.console import make_table

    drafters = " or ".join(name for name in (choice.drafter, choice.beside) if name)
    sessions = "one session" if load.max_sessions == 1 else f"{load.min_sessions} to {load.max_sessions} sessions"
    title = visible(f"drafts by {drafters} for {choice.verifier}")
    console.print(f"{title}, {sessions} at a time", soft_wrap=True, markup=False)
    table = make_table(COLUMNS, texts=COLUMNS[:1])
    table.collapse_padding = True  # so that a terminal of eighty columns has room
    for way in load.estimates:
        drafted, between_s = way.num_draft_tokens, way.round_s - way.verify_s - way.draft_s
        name = f"{drafted} {_drafter(choice, way, 'by ')}" if drafted else "plain"
        table.add_row(
            f"{'*' if _is_chosen(load, way) else ' '} {name}",
            f"{way.tokens_per_round:.2f}",
            f"{(way.tokens_per_round - 1.0) / drafted:.0%}".replace("%", " %") if drafted else "-",
            *(f"{1e3 * seconds:.1f}" for seconds in (way.round_s, way.verify_s, way.draft_s, between_s)),
            f"{rate_of(way):.1f}",
            f"{way.session_share:.2f}" if way.num_rounds else "-",
            str(way.num_rounds) if way.num_rounds else "-",
        )
    console.print(table)


def _is_chosen(load: Any, way: Any) -> bool:
    return (way.drafter, way.num_draft_tokens) == (load.chosen, load.num_draft_tokens)


def _drafter(choice: Any, way: Any, by: str) -> str:
    """Returns who drafts, in words that are short whatever models are called; `by` is before all but "ahead"."""
    if way.drafter == choice.beside:
        return f"{by}verifier"
    return f"{by}drafter" if way.drafter == choice.drafter else "ahead"


def _name(choice: Any, way: Any) -> str:
    if not way.num_draft_tokens:
        return "plain decoding"
    return f"{way.num_draft_tokens} token{'s' * (way.num_draft_tokens > 1)} {_drafter(choice, way, 'by the ')}"


def _compared(way: Any, other: Any) -> str:
    gain = rate_of(way) / rate_of(other) - 1.0
    return f"{abs(gain):.0%} {'more' if gain > 0.0 else 'less'}"
