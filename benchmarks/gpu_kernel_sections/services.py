"""The pair behind the three services: where a round's time goes, and tokens/s by sessions.

What services need is imported when it is: other sections run without it.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row

PACKAGES = (
    *("grpc", "grpc_health", "grpc_reflection", "google", "structlog", "typer", "rich", "prometheus_client"),
    *("fastapi", "uvicorn", "h11", "jinja2"),
)
"""That services need beside torch and transformers."""
CHAIN, TREE, TREE_DEPTH = 4, 60, 8
PROMPTS = {True: 2, False: 4}
NEW_TOKENS = {True: 32, False: 128}
"""Of the prompts of profiled rounds, by whether the plan is tiny."""
SESSIONS, TINY_SESSIONS = (1, 4, 16, 64), (2,)
TEMPERATURES = (1.0, 0.0)
LENGTHS = (0, CHAIN)
TEXT_TOKENS = {True: 64, False: 256}
"""Of each text where tokens/s are counted."""
SETTLE_S = {True: 0.4, False: 2.5}
SECONDS = {True: 0.5, False: 2.0}
CACHE_TOKENS = {True: 4096, False: 49_152}
"""Room for 64 texts with their prompts."""


def missing_packages() -> str:
    """Returns which packages of the services are not installed, in words; empty if they all are."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    return f"services need {', '.join(missing)}" if missing else ""


def round_profile(plan: Plan, pair: Path | None, findings: Findings, _: Budget) -> None:
    """Runs the section; `pair` is the folder, or None if it was not saved."""
    if (reason := missing_packages()) or pair is None:
        findings.lacks("rounds through the services", reason or "there is no saved pair")
        return
    from benchmarks.round_profile import Way, asks_of, profile_of, with_models
    from draftwire.cli.stack_options import stack_options

    new_tokens, num_prompts = NEW_TOKENS[plan.is_tiny], PROMPTS[plan.is_tiny]
    ways = {
        f"chain of {CHAIN}": Way(CHAIN, max_tokens=new_tokens),
        f"tree of {TREE} in {TREE_DEPTH}": Way(TREE_DEPTH, TREE, new_tokens),
    }
    options = stack_options(str(pair / "target"), str(pair / "drafter"), CHAIN)
    profiles = profile_of(
        with_models(options, str(plan.device), 1, TREE), {name: asks_of(way, num_prompts) for name, way in ways.items()}
    )
    for name, profile in profiles.items():
        findings.results[name] = profile
        findings.rows.append(Row(f"{name}: a round", profile["wall_ms"], "ms"))
        findings.rows += [Row(f"  {part}", own["ms"], "ms") for part, own in profile["parts"].items() if own["ms"]]
        findings.rows.append(Row(f"{name}: tokens of a round", profile["tokens_per_round"]))


def service_rates(plan: Plan, pair: Path | None, findings: Findings, budget: Budget) -> None:
    """Runs the section; `pair` is the folder, or None if it was not saved."""
    if (reason := missing_packages()) or pair is None:
        findings.lacks("tokens/s through the services", reason or "there is no saved pair")
        return
    from benchmarks.adaptive import Cell
    from benchmarks.gpu_services import Rate, models_of, rates

    findings.results["rates"] = found = []

    def report(rate: Rate) -> None:
        found.append(rate)
        sessions = f"{rate.sessions} session{'s' if rate.sessions > 1 else ''}"
        way = f"chains of {rate.length}" if rate.length else "plain"
        findings.rows.append(Row(f"{sessions}, T = {rate.temperature:g}, {way}", rate.tokens_per_second, "tokens/s"))

    def cells() -> Iterator[Cell]:
        for sessions, temperature in product(TINY_SESSIONS if plan.is_tiny else SESSIONS, TEMPERATURES):
            if budget.is_nearly_spent:
                findings.lacks(f"{sessions} sessions, T = {temperature:g}", "the section's time was spent")
                continue
            yield Cell("", "", sessions, temperature, TEXT_TOKENS[plan.is_tiny])

    models = models_of(pair, str(plan.device), CACHE_TOKENS[plan.is_tiny], 0)
    rates(models, cells(), LENGTHS, SETTLE_S[plan.is_tiny], SECONDS[plan.is_tiny], report)
