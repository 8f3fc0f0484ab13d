"""How often a round ends as its drafter could have guessed: the premise of drafting the next round ahead.

    python -m tools.synth --shape 370m --draft-layers 2 --agreement 0.8 --temperature 1.0 --out /tmp/370m
    python -m benchmarks.ahead_outcomes --large /tmp/370m --output benchmarks/results/ahead_outcomes.json

Prompts are continued in one process, and the drafter's own rows are looked at after each round. If the whole block was
accepted, the extra token is compared with the drafter's likeliest next tokens; if not, with its likeliest others in the
place of the rejected token. Under `coupled`, tokens are in the order in which they win the race of their place. Printed
are the shares of rounds in which the extra token is among the first 1, 2, 4 and 8.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.local_loop import LocalRun, LoopRound, speculate
from draftwire.method.keys import DrawKey, Role, derive_key
from draftwire.method.randomness import exponentials
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.loading import load_model
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_models import torch_model
from draftwire.requests.parameters import SamplingParams

DEPTHS = (1, 2, 4, 8)
"""So many guesses for one outcome."""


@dataclass(frozen=True)
class Outcome:
    """How one round ended."""

    num_accepted: int
    rank: int
    """Place of its extra token among the drafter's guesses for that ending, from 0."""
    is_whole: bool
    """Whether the whole block was accepted."""


class Onlooker:
    """Reads a text with the drafter's weights, apart from the drafter, and ranks the tokens of each place."""

    def __init__(self, model: CachedModel, prompt_ids: list[int], seed: int, *, is_coupled: bool) -> None:
        """Starts before the first round. Close it in the end."""
        self._model = model
        self._text = list(prompt_ids)
        self._read: list[int] = []
        self._cached = model.cache.open()
        words = DrawKey(derive_key(seed, Role.COUPLING), 0, 0).text_words
        self._words = torch.tensor([words]) if is_coupled else None

    @torch.inference_mode()
    def outcome(self, done: LoopRound) -> Outcome | None:
        """Returns how a round ended; None if it had no block."""
        length = int(done.blocks.lengths[0])
        drafted = done.blocks.draft_tokens[0, :length].tolist()
        if not drafted:
            self._text += done.token_ids
            return None
        row = self._row(drafted[: done.num_accepted])
        is_whole = done.num_accepted == length
        if not is_whole:
            row[drafted[done.num_accepted]] = -torch.inf
        rank = int((row > row[done.token_ids[-1]]).sum())
        self._text += done.token_ids
        return Outcome(done.num_accepted, rank, is_whole)

    def close(self) -> None:
        """Frees the cache."""
        self._model.cache.close(self._cached)

    def _row(self, accepted: list[int]) -> Tensor:
        """Returns `[vocab]` by which the tokens after the text and some drafted ones are ranked."""
        wanted = self._text + accepted
        kept = 0
        for known, token in zip(self._read, wanted[:-1], strict=False):
            if known != token:
                break
            kept += 1
        self._model.cache.truncate(self._cached, kept)
        self._read = wanted
        row = self._model.read([Reading(self._cached, wanted[kept:], 1)])[0].double()
        if self._words is None:
            return row
        times = exponentials(self._words, torch.tensor([len(wanted)]), len(row))[0]
        return row - times.log()


def outcomes_of(
    target: CachedModel, drafter: CachedModel, prompts: list[list[int]], run: LocalRun, context_length: int
) -> Iterator[Outcome]:
    """Yields the outcomes of all rounds with a block, one text after another."""
    strategy = LanguageModelDrafter(drafter, context_length)
    for seed, prompt in enumerate(prompts):
        own = LocalRun(run.sampling, run.num_tokens, run.block_length, run.rule, seed)
        onlooker = Onlooker(drafter, prompt, seed, is_coupled=run.rule == "coupled")
        for done in speculate(target, strategy, prompt, own):
            if (outcome := onlooker.outcome(done)) is not None:
                yield outcome
        onlooker.close()


def shares(outcomes: list[Outcome]) -> dict[str, object]:
    """Returns the figures of one setting."""
    whole = [outcome for outcome in outcomes if outcome.is_whole]
    rejected = [outcome for outcome in outcomes if not outcome.is_whole]

    def among(members: list[Outcome]) -> list[float]:
        return [sum(member.rank < depth for member in members) / max(1, len(members)) for depth in DEPTHS]

    return {
        "rounds": len(outcomes),
        "accepted": sum(outcome.num_accepted for outcome in outcomes) / len(outcomes),
        "whole": len(whole) / len(outcomes),
        "bonus_among": among(whole),
        "recovered_among": among(rejected),
        "accepted_counts": dict(sorted(Counter(outcome.num_accepted for outcome in outcomes).items())),
    }


def main() -> None:
    """Measures, prints a line for each setting, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--large", type=Path, help="folder of the 374 M pair; without it, it is left out")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--block-length", type=int, default=4)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    embedded = stack_options(EMBEDDED, None, arguments.block_length)
    pairs = {"embedded": (Path(str(embedded["verifier"]["model"])), Path(str(embedded["drafter"]["model"])))}
    if arguments.large is not None:
        pairs["374 M"] = (arguments.large / "target", arguments.large / "drafter")
    results: dict[str, object] = {}
    settings = [(name, temperature, rule) for name in pairs for temperature, rule in SETTINGS]
    loaded: dict[str, tuple[CachedModel, CachedModel, list[list[int]], int]] = {}
    for name, temperature, rule in progress(settings, "settings"):
        if name not in loaded:
            loaded = {name: _load(*pairs[name], load_prompts()[: arguments.prompts])}
        target, drafter, prompts, context_length = loaded[name]
        run = LocalRun(SamplingParams(temperature), arguments.max_tokens, arguments.block_length, rule, 0)
        figures = shares(list(outcomes_of(target, drafter, prompts, run, context_length)))
        results[f"{name}, temperature {temperature:g}, {rule}"] = figures
        print(f"{name}, temperature {temperature:g}, {rule}: {figures}")
    write_report(arguments, {"depths": DEPTHS, "results": results})


SETTINGS = ((0.0, "block"), (1.0, "block"), (1.0, "coupled"))


def _load(
    target_folder: Path, drafter_folder: Path, prompts: list[str]
) -> tuple[CachedModel, CachedModel, list[list[int]], int]:
    """Returns both models with caches, the prompts as ids, and the drafter's context length."""
    target, drafter = load_model(str(target_folder)), load_model(str(drafter_folder))
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    context_length = min(2048, drafter.description.context_length)
    models = [torch_model(decoder_of(model.model), 2 * context_length) for model in (target, drafter)]
    return models[0], models[1], [tokenizer(prompt)["input_ids"] for prompt in prompts], context_length


if __name__ == "__main__":
    main()
