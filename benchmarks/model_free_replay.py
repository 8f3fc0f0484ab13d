"""How much of a text could have been guessed from its own earlier places: texts of the embedded target, read again.

    python -m benchmarks.model_free_replay --output benchmarks/results/model_free_replay.json

Three kinds of work, from the committed prompts, at temperature 0 and 1: completion of a prompt; editing, where a file
of four prompts is followed by the first quarter of its copy; quoting, where it is followed by another prompt and the
beginning of a passage. Each text is committed token by token, and guessed at each place: of a guess, the tokens up to
the first that differs would have been accepted. At temperature 1 that is unbiased too, since a guess is accepted with
the probability that the target draws it. Time is that of a guess and a commit, median over places.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.prompts import load_prompts
from benchmarks.report import write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options
from draftwire.client import Client
from draftwire.options.model_free.prompt_lookup import LookupText
from draftwire.options.model_free.suffix import SuffixText
from draftwire.options.model_free.text_drafter import TextDrafter

NUM_GUESSED = 8
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Least length of the matches that are counted together."""
SOURCES: dict[str, TextDrafter] = {
    "lookup": partial(LookupText, least_match=1),
    "suffix": partial(SuffixText, least_match=1),
}


def works(count: int) -> Iterator[tuple[str, str]]:
    """Yields a kind of work and a prompt of it, so many of each."""
    pieces = load_prompts()
    for index in range(count):
        first, second, third, fourth, other = (pieces[(5 * index + offset) % len(pieces)] for offset in range(5))
        file = f"{first}\n{second}\n{third}\n{fourth}\n"
        yield "completion", first
        yield "editing", f"{file}\n{first}\n"
        yield "quoting", f"{file}\n{other}\n{third[: len(third) // 3]}"


def replay(drafter: TextDrafter, prompt: Sequence[int], text: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """Yields, for each place of a text, the length of the match, the tokens accepted of its guess, and seconds."""
    followed = drafter(prompt)
    for place, token in enumerate(text):
        started = time.perf_counter()
        guess = followed.guess(NUM_GUESSED)
        followed.commit([token])
        seconds = time.perf_counter() - started
        pairs = zip(guess.token_ids, text[place:], strict=False)
        accepted = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        yield (
            guess.match_len,
            min(len(guess.token_ids), len(text) - place) if accepted is None else accepted,
            seconds,
        )


def figures(places: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    """Returns what guesses at some places were worth."""
    by_match: dict[int, list[int]] = defaultdict(list)
    for match_len, accepted, _ in places:
        if match_len:
            by_match[max(bucket for bucket in BUCKETS if bucket <= match_len)].append(accepted)
    return {
        "places": len(places),
        "share_guessed": mean(match_len > 0 for match_len, _, _ in places),
        "accepted_per_place": mean(accepted for _, accepted, _ in places),
        "microseconds": 1e6 * median(seconds for _, _, seconds in places),
        "by_match": {
            str(bucket): {
                "guesses": len(by_match[bucket]),
                "accepted": mean(by_match[bucket]),
                "first_accepted": mean(accepted > 0 for accepted in by_match[bucket]),
            }
            for bucket in sorted(by_match)
        },
    }


def main() -> None:
    """Lets the target write, replays, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=24, help="of each kind and temperature")
    parser.add_argument("--max-tokens", type=int, default=128, help="of a text")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    asked = [(kind, temperature, prompt) for temperature in (0.0, 1.0) for kind, prompt in works(arguments.texts)]
    with LocalStack(stack_options(EMBEDDED, None, None)) as stack, Client(stack.address) as client:

        def write(work: tuple[str, float, str]) -> tuple[list[int], list[int]]:
            _, temperature, prompt = work
            options: dict[str, Any] = {"max_tokens": arguments.max_tokens, "ignore_eos": True, "echo": True}
            done = client.generate(prompt, temperature=temperature, seed=0, **options)
            return done.prompt_token_ids or [], done.token_ids

        with ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(write, asked))
    results = []
    for name, drafter in SOURCES.items():
        places: dict[tuple[str, float], list[tuple[int, int, float]]] = defaultdict(list)
        for (kind, temperature, _), (prompt, text) in zip(asked, texts, strict=True):
            places[kind, temperature] += replay(drafter, prompt, text)
        for (kind, temperature), found in places.items():
            results.append({"source": name, "work": kind, "temperature": temperature, **figures(found)})
    write_report(arguments, {"guessed_tokens": NUM_GUESSED, "results": results})


if __name__ == "__main__":
    main()
