"""Answers of a chat model to questions, one at a time: who drafts, and what that makes of plain decoding.

    python -m benchmarks.questions --target smollm2 --output benchmarks/results/questions.json
    python -m benchmarks.questions --target DIR --head DIR --engine openvino --weights u8 --output ...

The verifier drafts from earlier places of each text. With a head it drafts by that, and a drafter without a model from
earlier places. The ways are

    plain         without drafts
    chosen        by whom and how much is chosen, as by default
    head          by the head alone, as much as is chosen
    matches       from earlier places alone, as much as is chosen
    head of 1     by the head alone, one token a round; of 2, and so on
    matches of 4  from earlier places alone, up to four tokens a round

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
from draftwire.cli.named_models import CHAT_MODEL
from draftwire.cli.stack_options import NO_DRAFTER, Computing, stack_options
from draftwire.client import Client

PLAIN, CHOSEN, HEAD, MATCHES = "plain", "chosen", "head", "matches"
QUESTIONS = Path(__file__).parent / "questions.jsonl"
"""Each with its kind. No text that a head is trained on has eight words of one in a row."""


def ways_of(head: str | None, lengths: list[int]) -> dict[str, dict[str, Any]]:
    """Returns the options of requests, by way. A head is named as its strategy; None is none."""
    plain, matches = {"num_speculative_tokens": 0}, {"drafter": "suffix"}
    if head is None:
        fixed = {f"{MATCHES} of {length}": {**matches, "num_speculative_tokens": length} for length in lengths}
        return {PLAIN: plain, CHOSEN: {}, **fixed}
    fixed = {f"{HEAD} of {length}": {"drafter": head, "num_speculative_tokens": length} for length in lengths}
    return {PLAIN: plain, CHOSEN: {}, HEAD: {"drafter": head}, MATCHES: matches, **fixed}


def answer_rate(client: Client, question: str, options: dict[str, Any]) -> float:
    """Returns the tokens/s of an answer, the reading of the question included."""
    started = time.perf_counter()
    completion = client.generate([{"role": "user", "content": question}], **options)
    return len(completion.token_ids) / (time.perf_counter() - started)


def main() -> None:
    """Measures, prints tables and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=CHAT_MODEL, help="folder, GGUF file, or name")
    parser.add_argument("--head", metavar="DIR", help="an EAGLE-3 head of the target")
    parser.add_argument("--engine")
    parser.add_argument("--weights")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.2, 1.0])
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5, help="of plain decoding and of chosen drafts")
    parser.add_argument("--other-turns", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2], help="fixed ones")
    parser.add_argument("--top-p", type=float, default=1.0, help="above temperature 0")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()[: arguments.questions]
    questions = [json.loads(line)["question"] for line in lines]
    ways = ways_of("eagle3" if arguments.head else None, arguments.lengths)
    computing = Computing(arguments.engine, arguments.weights)
    options = stack_options(arguments.target, NO_DRAFTER, None, arguments.head, computing)
    if arguments.head:
        options["drafter"] = {"model": options["verifier"]["model"], "strategy": "suffix"}
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
                            "top_p": arguments.top_p if temperature else 1.0,
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
