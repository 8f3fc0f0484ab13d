"""`draftwire bench`: throughput and latency of a gateway, with speculative and plain decoding."""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwire.cli.bench_explanation import explanation_fields, print_explanation, why_slower
from draftwire.cli.connection_options import ConnectionOptions
from draftwire.cli.option_groups import with_options
from draftwire.cli.request_options import MAX_TOKENS, RequestOptions
from draftwire.errors import DraftwireError, InvalidRequestError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from draftwire.client import AsyncClient
    from draftwire.client.measuring import Run
    from draftwire.client.prompts import Prompt

PROMPTS = (
    "def merge_sorted(a, b):",
    "import os\nimport sys\n",
    "class Stack:\n    def __init__(self):",
    "def test_parse():\n",
    "from collections import",
    "def read_config(path):\n    with open(path) as file:",
    '"""Utilities for strings."""\n\nimport re\n',
    "for i in range(10):\n",
)
"""Default prompts: beginnings of Python files, which the embedded pair was trained on."""
LEAST_REQUESTS, REQUESTS_AT_A_TIME = 16, 4
"""Completions of a run by default: the least in all, and for each that runs at a time. A run of one wave takes as long
as its longest text, and how many tokens the others have by then is chance.
"""
COUNTED = {"runs": "run", "requests": "completion"}
"""Counts of a benchmark, and what one of each is."""
PERCENTILES = (50, 90, 99)
TIMES = {
    "time_to_first_token_ms": "ms to first token",
    "time_per_token_ms": "ms per token",
    "completion_ms": "ms per completion",
}
"""Table titles of the times that are reported as percentiles."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Prompts, request options, concurrency and number of runs of a benchmark."""

    prompts: "list[Prompt]"
    options: dict[str, Any]
    num_requests: int
    concurrency: int
    num_runs: int
    beside_plain: bool

    @property
    def variants(self) -> dict[str, dict[str, Any]]:
        """The request options of each column, by the column's name."""
        if self.options["num_speculative_tokens"] == 0:
            return {"plain": self.options}
        columns = {"speculation": self.options}
        return columns | ({"plain": {**self.options, "num_speculative_tokens": 0}} if self.beside_plain else {})

    def jobs(self, run: int, options: dict[str, Any], num_requests: int) -> "list[tuple[Prompt, Any]]":
        """Returns the requests of a run. No two requests share a prefix in the server's cache, even with equal prompts.
        Seeds depend on the run and not on the column.

        Raises:
            InvalidRequestError: the seed is out of range.
        """
        from draftwire.client.batch import seed_of

        salt, seed, jobs = token_hex(16), options["seed"], []
        for number, prompt in enumerate(islice(cycle(self.prompts), num_requests)):
            own_seed = None if seed is None else seed_of(seed, run * self.num_requests + number)
            jobs.append((prompt, {**options, "seed": own_seed, "cache_salt": f"{salt} {number}"}))
        return jobs


@with_options
def bench(
    connection: ConnectionOptions,
    request: RequestOptions,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            readable=True,
            help="File with a prompt in each line; in a .jsonl file as JSON: a text, token ids or chat messages.",
            show_default="eight beginnings of Python files",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Completions of a run; prompts are used again and again.",
            show_default=f"{REQUESTS_AT_A_TIME} for each of --concurrency, at least {LEAST_REQUESTS}",
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Completions at a time.")] = 4,
    runs: Annotated[int, typer.Option(min=1, help="How often all is repeated; medians are shown.")] = 3,
    beside_plain: Annotated[
        bool, typer.Option(help="Decode the same prompts plainly too, after each run, and compare.")
    ] = True,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print what each way to draft would make, and why the chosen one is best.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Measure how fast a gateway completes prompts, with speculation and plainly."""
    import asyncio

    from rich.progress import MofNCompleteColumn

    from draftwire.cli.console import make_console, make_progress

    arguments = request.arguments(MAX_TOKENS)
    if request.max_tokens == 0:
        raise InvalidRequestError("max_tokens: without tokens there is nothing to measure")
    num_requests = default_requests(concurrency) if requests is None else requests
    plan = BenchPlan(
        prompts=list(PROMPTS) if prompts is None else list(read_prompts(prompts)),
        options=arguments,
        num_requests=num_requests,
        concurrency=min(concurrency, num_requests),
        num_runs=runs,
        beside_plain=beside_plain,
    )
    bar = make_progress(make_console(stderr=True), MofNCompleteColumn())
    with connection.open_async() as client, bar as progress:
        columns, explanation = asyncio.run(_measure(client, plan, connection.wait, progress, explain))
    results: dict[str, Any] = {
        "requests": plan.num_requests,
        "concurrency": plan.concurrency,
        "runs": runs,
        "prompts": len(plan.prompts),
        "options": {
            name: value
            for name, value in plan.options.items()
            if value is not None and value is not False and value != ()
        },
        **{name: summary(column) for name, column in columns.items()},
    }
    if len(columns) == 2:
        results["speedup"] = speedup(columns["speculation"], columns["plain"])
    if explain:
        results["explanation"] = explanation_fields(explanation)
    if as_json:
        typer.echo(json.dumps(results, indent=2, default=str))
        return
    console = make_console()
    _print_table(console, results)
    if len(columns) == 2 and results["speedup"]["median"] < 1.0 and explanation is not None:
        console.print(why_slower(arguments, explanation, plan.concurrency), soft_wrap=True)
    if explain:
        print_explanation(console, explanation, plan.concurrency)


def default_requests(concurrency: int) -> int:
    """Returns how many completions a run has, unless a number is asked for."""
    return max(LEAST_REQUESTS, REQUESTS_AT_A_TIME * concurrency)


def read_prompts(path: Path) -> "Iterator[Prompt]":
    """Yields the prompts of a file, without empty lines.

    Raises:
        InvalidRequestError: the file cannot be read or holds no prompt, or a line is not a valid prompt.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from error
    given = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not given:
        raise InvalidRequestError(f"{path} holds no prompt")
    for number, line in given:
        try:
            yield line if path.suffix != ".jsonl" else _prompt_of(line)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{path}: line {number}: {error}") from error


def _prompt_of(line: str) -> "Prompt":
    from draftwire.client.prompts import is_several, prompt_fields
    from draftwire.client.request_maker import naming

    try:
        prompt: Prompt = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("this is no JSON") from error
    if is_several(prompt):
        raise InvalidRequestError("a line holds one prompt")
    with naming("prompt"):
        prompt_fields(prompt)
    return prompt


async def _measure(
    client: "AsyncClient", plan: BenchPlan, wait_s: float, progress: "Progress", explain: bool
) -> "tuple[dict[str, list[Run]], Any]":
    """Returns the runs of each column, and the server's `ExplainSpeculationResponse`; None if it has none and nobody
    asks for it. The columns alternate, so that other load on the machine affects both.
    """
    from draftwire.client.measuring import measure

    columns: dict[str, list[Run]] = {name: [] for name in plan.variants}
    async with client:
        await client.wait_ready(wait_s)
        bar = progress.add_task("warming up", total=plan.num_runs * len(columns) * plan.num_requests)
        for options in plan.variants.values():  # the first requests pay for connections and lazy initialisation
            short = {**options, "max_tokens": min(8, options["max_tokens"]), "min_tokens": None}
            await measure(client, plan.jobs(0, short, plan.concurrency), plan.concurrency)
        for run in range(plan.num_runs):
            for name, options in plan.variants.items():
                progress.update(bar, description=f"{name}, run {run + 1} of {plan.num_runs}")
                jobs = plan.jobs(run, options, plan.num_requests)
                columns[name].append(await measure(client, jobs, plan.concurrency, lambda: progress.advance(bar)))
        try:
            return columns, await client.explain_speculation()
        except DraftwireError:  # of a server that does not know of it
            if explain:
                raise
            return columns, None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Returns the smallest value that at least `percent` percent of all do not exceed; None if there are no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] if ordered else None


def summary(runs: "Sequence[Run]") -> dict[str, Any]:
    """Returns medians over runs, and percentiles over all completions in milliseconds."""
    timings = [timing for run in runs for timing in run.timings]
    rates = [run.acceptance_rate for run in runs if run.acceptance_rate is not None]
    times = {
        "time_to_first_token_ms": [timing.first_token_s * 1e3 for timing in timings],
        "time_per_token_ms": [timing.per_token_s * 1e3 for timing in timings if timing.per_token_s is not None],
        "completion_ms": [timing.duration_s * 1e3 for timing in timings],
    }
    return {
        "tokens": sum(run.num_tokens for run in runs),
        "tokens_per_second": statistics.median(run.tokens_per_second for run in runs),
        "completions_per_second": statistics.median(run.completions_per_second for run in runs),
        "block_efficiency": statistics.median(run.block_efficiency for run in runs),
        "acceptance_rate": statistics.median(rates) if rates else None,
        "is_lossy": any(timing.completion.is_lossy for timing in timings),
        "without_drafter": sum(bool(timing.completion.drafter_error) for timing in timings),
        "resumed": sum(timing.completion.num_resumed > 0 for timing in timings),
        **{
            name: {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
            for name, values in times.items()
        },
        "tokens_per_second_of_runs": [run.tokens_per_second for run in runs],
    }


def speedup(speculation: "Sequence[Run]", plain: "Sequence[Run]") -> dict[str, float]:
    """Returns the ratio of tokens/s between each run and the plain run that followed: median, least and most."""
    ratios = [fast.tokens_per_second / slow.tokens_per_second for fast, slow in zip(speculation, plain, strict=True)]
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def _cells(column: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "tokens/s", f"{column['tokens_per_second']:.1f}"
    yield "completions/s", f"{column['completions_per_second']:.2f}"
    for name, title in TIMES.items():
        for percent in PERCENTILES:
            value = column[name][f"p{percent}"]
            yield f"{title}, p{percent}", "-" if value is None else f"{value:.1f}"
    yield "block efficiency", f"{column['block_efficiency']:.2f}"
    rate = column["acceptance_rate"]
    yield "acceptance rate", "-" if rate is None else f"{rate:.3f}"


def _print_table(console: "Console", results: dict[str, Any]) -> None:
    from draftwire.cli.console import make_table

    names = [name for name in ("speculation", "plain") if name in results]
    table = make_table(["", *names], texts=[""])
    for cells in zip(*(_cells(results[name]) for name in names), strict=True):
        table.add_row(cells[0][0], *(value for _, value in cells))
    runs, completions = (f"{results[name]} {one}{'s' * (results[name] != 1)}" for name, one in COUNTED.items())
    console.print(f"{runs} of {completions}, {results['concurrency']} at a time")
    console.print(table)
    if ratio := results.get("speedup"):
        span = f"{ratio['least']:.2f} to {ratio['most']:.2f}"
        speed = f"speculation makes {ratio['median']:.2f} times the tokens/s of plain decoding ({span})"
        console.print(speed, soft_wrap=True)
    for warning in _warnings(results.get("speculation", results[names[0]])):
        console.print(f"[yellow]{warning}[/yellow]", soft_wrap=True)


def _warnings(column: dict[str, Any]) -> Iterator[str]:
    if column["is_lossy"]:
        yield "the rule is lossy: the texts are not distributed as the target's"
    if column["without_drafter"]:
        yield f"{column['without_drafter']} completions went on without the drafter"
    if column["resumed"]:
        yield f"{column['resumed']} completions were resumed: block efficiency and acceptance are of their last parts"
