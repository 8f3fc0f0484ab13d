"""Statistics of a completion on standard error: one line, or a table."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from draftwire.cli.colors import visible
from draftwire.cli.writer import Display

if TYPE_CHECKING:
    from rich.console import Console

    from draftwire.client import Completion

BAR_WIDTH = 20
"""Width of a bar of 100 %, in columns."""


def show_statistics(completion: "Completion", display: Display) -> None:
    """Prints the statistics as `display` asks for, and always the warnings of a lossy rule or a lost drafter."""
    from draftwire.cli.console import make_console

    console = make_console(stderr=True, when=display.when)
    if display.stats:
        _print_table(console, completion)
    elif not display.quiet:
        console.print(visible(summary(completion)), style="dim", markup=False, soft_wrap=True)
    _warn(console, completion)


def summary(completion: "Completion") -> str:
    """Returns one line: tokens, tokens/s, block efficiency, acceptance rate, rounds, rule, seed."""
    num_resumed = completion.num_resumed
    resumed = f"resumed {num_resumed} times, numbers of the last part: " if num_resumed else ""
    return (
        f"{len(completion.token_ids)} tokens · {resumed}{completion.tokens_per_second:.1f} tokens/s · "
        f"block efficiency {completion.block_efficiency:.2f} · acceptance rate {completion.acceptance_rate:.3f} · "
        f"{completion.statistics.num_rounds} rounds · rule {completion.rejection_sample_method} · "
        f"seed {completion.seed}"
    )


def _warn(console: "Console", completion: "Completion") -> None:
    from rich.markup import escape

    if completion.is_lossy:
        name = escape(visible(completion.rejection_sample_method))
        console.print(f"[yellow]{name} is lossy: the text is not distributed as the target's[/yellow]", soft_wrap=True)
    if completion.drafter_error:
        reason = escape(visible(completion.drafter_error))
        console.print(f"[yellow]went on without the drafter: {reason}[/yellow]", soft_wrap=True)


def _print_table(console: "Console", completion: "Completion") -> None:
    from rich.table import Table
    from rich.text import Text

    mark = "#" if console.options.ascii_only else "█"
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop")
    for name, value in _numbers(completion):
        table.add_row(name, Text(visible(value)))
    for label, shares in (("accepted at", _by_position(completion)), ("time in", _by_part(completion))):
        for name, value, share in shares:
            bar = Text(mark * round(BAR_WIDTH * share), style="green" if label == "accepted at" else "magenta")
            table.add_row(f"{label} {name}", value, bar)
    console.print(table)


def _numbers(completion: "Completion") -> Iterator[tuple[str, str]]:
    statistics = completion.statistics
    yield "tokens", str(len(completion.token_ids))
    if completion.num_resumed:
        yield "resumed", f"{completion.num_resumed} times"
        yield "tokens of the last part", str(statistics.num_generated_tokens)
    yield "tokens/s", f"{completion.tokens_per_second:.1f}"
    yield "time to first token", f"{statistics.time_to_first_token_us / 1e3:.1f} ms"
    yield "rounds", str(statistics.num_rounds)
    yield "block efficiency", f"{completion.block_efficiency:.2f}"
    accepted = f"{statistics.num_accepted_tokens} of {statistics.num_draft_tokens}"
    yield "draft tokens accepted", accepted
    yield "acceptance rate", f"{completion.acceptance_rate:.3f}"
    if statistics.num_trees:
        yield "token trees", f"{statistics.num_trees} of {statistics.num_drafts} drafts"
    hits, late, misses = statistics.num_ahead_hits, statistics.num_ahead_late, statistics.num_ahead_misses
    if num_ahead := hits + late + misses:
        yield "blocks drafted ahead", f"{hits} of {num_ahead}"
        yield "of the others, late", str(late)
        yield "draft tokens wasted ahead", str(statistics.num_ahead_wasted_tokens)
    yield "cached prompt tokens", f"{statistics.num_cached_prompt_tokens} of {statistics.num_prompt_tokens}"
    yield "lost drafters", str(statistics.num_drafters_lost)
    yield "lost verifiers", str(statistics.num_verifiers_lost)
    yield "rule", completion.rejection_sample_method
    yield "seed", str(completion.seed)


def _by_position(completion: "Completion") -> Iterator[tuple[str, str, float]]:
    """Yields, for each position of a block, the share of blocks in which its token was accepted."""
    num_blocks = max(1, completion.statistics.num_drafts)
    for position, count in enumerate(completion.statistics.num_accepted_tokens_per_pos, 1):
        share = count / num_blocks
        yield f"position {position}", f"{share:.3f}", share


def _by_part(completion: "Completion") -> Iterator[tuple[str, str, float]]:
    """Yields the parts of the time from the request's arrival to its last token."""
    statistics = completion.statistics
    parts = {
        "draft": statistics.draft_duration_us,
        "calibration": statistics.calibration_duration_us,
        "verify": statistics.verify_duration_us,
        "queue": statistics.queue_duration_us,
    }
    total = max(statistics.duration_us, sum(parts.values()), 1)
    parts["rest"] = total - sum(parts.values())
    for name, duration_us in parts.items():
        yield name, f"{duration_us / 1e3:.1f} ms", duration_us / total
