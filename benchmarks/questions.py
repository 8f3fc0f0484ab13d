"""Answers of a chat model to questions, one at a time: who drafts, and what that makes of plain decoding.

    python -m benchmarks.questions --target DIR --head DIR --engine openvino --weights u8 --output ...

The verifier has a head, and a drafter without a model drafts from earlier places of the text. The ways are

    plain         without drafts
    chosen        by whom and how much is chosen, as by default
    head          by the head alone, as much as is chosen
    matches       from earlier places alone, as much as is chosen
    head of 1     by the head alone, one token a round; of 2, and so on

At each temperature every question is answered by every way in turn, in an order of its own: plain and chosen `--turns`
times, others `--other-turns` times. No seed is given: with one, lengths are not chosen above temperature 0. A ratio is
of tokens/s, by medians of one question's turns.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.stack_options import threads_for
from draftwire.client import Client

PLAIN, CHOSEN, HEAD, MATCHES = "plain", "chosen", "head", "matches"
QUESTIONS = Path(__file__).parent / "questions.jsonl"
"""Each with its kind. No text that a head is trained on has eight words of one in a row."""


def ways_of(head: str, lengths: list[int]) -> dict[str, dict[str, Any]]:
    """Returns the options of requests, by way. The head is named as its strategy."""
    fixed = {f"{HEAD} of {length}": {"drafter": head, "num_speculative_tokens": length} for length in lengths}
    return {
        PLAIN: {"num_speculative_tokens": 0},
        CHOSEN: {},
        HEAD: {"drafter": head},
        MATCHES: {"drafter": "suffix"},
        **fixed,
    }


def answer_rate(client: Client, question: str, options: dict[str, Any]) -> float:
    """Returns the tokens/s of an answer, the reading of the question included."""
    started = time.perf_counter()
    completion = client.generate([{"role": "user", "content": question}], **options)
    return len(completion.token_ids) / (time.perf_counter() - started)


def main() -> None:
    """Measures, prints tables and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", required=True, metavar="DIR")
    parser.add_argument("--head", required=True, metavar="DIR", help="an EAGLE-3 head of the target")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.2, 1.0])
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5, help="of plain decoding and of chosen drafts")
    parser.add_argument("--other-turns", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2], help="of drafts of the head")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()[: arguments.questions]
    questions = [json.loads(line)["question"] for line in lines]
    ways = ways_of("eagle3", arguments.lengths)
    computing = {"engine": arguments.engine, "weights": arguments.weights}
    options = {
        "verifier": {
            "model": arguments.target,
            "draft_head": arguments.head,
            "threads": threads_for(arguments.target),
            **computing,
        },
        "drafter": {"model": arguments.target, "strategy": "suffix"},
        "gateway": {},
    }
    results: dict[str, Any] = {}
    with LocalStack(options, start_timeout_s=600.0) as stack, Client(stack.address) as client:
        for temperature in arguments.temperatures:
            rates: dict[str, dict[str, list[float]]] = {question: {way: [] for way in ways} for question in questions}
            for turn in progress(range(arguments.turns), f"T = {temperature:g}"):
                for number, question in enumerate(questions):
                    order = [way for way in ways if way in (PLAIN, CHOSEN) or turn < arguments.other_turns]
                    for way in random.Random(turn * 1000 + number).sample(order, len(order)):
                        how = {
                            "temperature": temperature,
                            "max_tokens": arguments.max_tokens,
                            **ways[way],
                        }
                        rates[question][way].append(
                            answer_rate(client, question, {**how, "cache_salt": f"{turn} {way}"})
                        )
            results[f"T = {temperature:g}"] = summary = summarize(rates)
            print(
                f"\nT = {temperature:g}: of plain decoding, median of {len(questions)} questions, least, lowest first"
            )
            for way, found in summary["over_plain"].items():
                lowest = " ".join(f"{each:.2f}" for each in sorted(found["by_question"])[:5])
                print(f"  {way:<12} {found['median']:.3f}  {found['least']:.3f}   {lowest}")
            print(f"  plain: {summary['plain_tokens_per_second']:.1f} tokens/s", flush=True)
    write_report(arguments, results)


def summarize(rates: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Returns what ways made of plain decoding, from tokens/s by question and way."""
    medians = {question: {way: statistics.median(own) for way, own in ways.items()} for question, ways in rates.items()}
    over_plain = {}
    for way in next(iter(medians.values())):
        if way != PLAIN:
            ratios = [own[way] / own[PLAIN] for own in medians.values()]
            over_plain[way] = {"median": statistics.median(ratios), "least": min(ratios), "by_question": ratios}
    plain = statistics.median(own[PLAIN] for own in medians.values())
    return {"plain_tokens_per_second": plain, "over_plain": over_plain}


if __name__ == "__main__":
    main()
