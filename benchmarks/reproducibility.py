"""Reproducibility under the rule `coupled`: one text per seed, whatever the drafter, through the real services.

    python -m benchmarks.reproducibility --output benchmarks/results/reproducibility.json

Prompts are continued with fixed seeds by the embedded target, with several drafters (the embedded one, a bigram model,
and one whose weights are random), block lengths and concurrencies. Every text is compared with the one of plain
decoding at concurrency 1. Where two texts diverge, the target's two candidates must be a near-tie at that position:
their leads are recomputed in this process, and reported.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.prompts import load_prompts
from benchmarks.report import write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED, embedded_model
from draftwire.cli.stack_options import stack_options
from draftwire.client import Client, Completion
from draftwire.method.keys import DrawKey, Role, derive_key
from draftwire.method.randomness import exponentials
from draftwire.method.sampling import probabilities
from draftwire.requests.parameters import SamplingParams

BLOCK_LENGTHS = (0, 1, 4, 8)
CONCURRENCIES = (1, 8)
LARGEST_LEAD = 1e-4
"""Forward passes of different shapes order candidates differently only if their log-weights are closer than this."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that must not affect the texts."""

    drafter: str
    block_length: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Texts of one setting compared with those of plain decoding."""

    setting: Setting
    texts: int
    differing: int
    unreported: int
    """Number of differing texts where neither side reported a near-tie."""
    largest_lead: float
    """Largest lead where texts diverge, in log-weight; 0 if none do."""
    near_ties: int
    """Tokens that the verifier reported as such."""
    tokens: int
    acceptance_rate: float


def save_drafters(folder: Path) -> dict[str, str]:
    """Writes the bigram and the random drafter, and returns the folders of all drafters by name."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model("drafter"))
    torch.manual_seed(0)
    garbage = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(embedded_model("drafter")))
    bigram = bigram_model(AutoModelForCausalLM.from_pretrained(embedded_model("target"), dtype=torch.float32))
    for name, model in (("garbage", garbage), ("bigram", bigram)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {"embedded": embedded_model("drafter")} | {name: str(folder / name) for name in ("bigram", "garbage")}


@torch.inference_mode()
def bigram_model(target: PreTrainedModel) -> PreTrainedModel:
    """Returns a bigram model: its logits depend on the last token only, as the target's do at the start of a text.

    Its one layer adds 0, and the product of its two embeddings is a low-rank approximation of the target's table of
    logits. The last dimension gives all embeddings the same norm, so that the final norm has no effect either.
    """
    config = AutoConfig.from_pretrained(embedded_model("target"), num_hidden_layers=1, tie_word_embeddings=False)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    logits = target(input_ids=torch.arange(config.vocab_size).unsqueeze(1)).logits[:, 0]
    left, sizes, right = torch.svd_lowrank(logits - logits.mean(dim=1, keepdim=True), q=config.hidden_size - 1)
    rows = left * sizes.sqrt()
    length = rows.norm(dim=1).max()
    filler = (length**2 - rows.square().sum(dim=1)).clamp(min=0.0).sqrt()
    model.get_input_embeddings().weight.copy_(torch.cat([rows, filler.unsqueeze(1)], dim=1))
    output = torch.cat([right * sizes.sqrt(), torch.zeros(len(right), 1)], dim=1)
    model.get_output_embeddings().weight.copy_(output * length / config.hidden_size**0.5)
    layer = model.model.layers[0]
    for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
        torch.nn.init.zeros_(projection.weight)
    return cast(PreTrainedModel, model)


def draw_texts(address: str, prompts: Sequence[str], max_tokens: int, setting: Setting) -> list[Completion]:
    """Continues the prompts, the first with seed 0, the second with 1, and so on."""
    with Client(address) as client, ThreadPoolExecutor(setting.concurrency) as pool:

        def draw(seed: int) -> Completion:
            return client.generate(
                prompts[seed],
                max_tokens=max_tokens,
                temperature=1.0,
                seed=seed,
                num_speculative_tokens=setting.block_length,
                rejection_sample_method="coupled",
            )

        return list(pool.map(draw, range(len(prompts))))


class Judge:
    """Recomputes the leads of candidates."""

    def __init__(self) -> None:
        """Loads the target."""
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            embedded_model("target"), dtype=torch.float32
        ).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(embedded_model("target"))

    @torch.inference_mode()
    def lead(self, prompt: str, seed: int, one: list[int], other: list[int]) -> float:
        """Returns the difference in log-weight of two texts' candidates where the texts diverge."""
        same = next(index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        ids = [*self._tokenizer(prompt)["input_ids"], *one[:same]]
        weights = probabilities(self._model(input_ids=torch.tensor([ids])).logits[0, -1], SamplingParams())
        words = torch.tensor([DrawKey(derive_key(seed, Role.COUPLING), 0, 0).text_words])
        times = exponentials(words, torch.tensor([len(ids)]), len(weights))[0]
        scores = (weights.double() / times).log()
        return float((scores[one[same]] - scores[other[same]]).abs())


def compare(prompts: Sequence[str], max_tokens: int, drafters: Sequence[str] | None = None) -> Iterator[Comparison]:
    """Yields a comparison for each setting with the texts of the first setting."""
    judge = Judge()
    references: list[Completion] = []
    with tempfile.TemporaryDirectory() as folder:
        for drafter, path in save_drafters(Path(folder)).items():
            if drafters is not None and drafter not in drafters:
                continue
            with LocalStack(stack_options(EMBEDDED, path, 4)) as stack:
                for concurrency, block_length in product(CONCURRENCIES, BLOCK_LENGTHS):
                    setting = Setting(drafter, block_length, concurrency)
                    completions = draw_texts(stack.address, prompts, max_tokens, setting)
                    references = references or completions
                    yield _compare(judge, prompts, references, completions, setting)


def _compare(
    judge: Judge,
    prompts: Sequence[str],
    references: Sequence[Completion],
    completions: Sequence[Completion],
    setting: Setting,
) -> Comparison:
    differing = [
        (seed, one, other)
        for seed, (one, other) in enumerate(zip(references, completions, strict=True))
        if one.token_ids != other.token_ids
    ]
    leads = [judge.lead(prompts[seed], seed, one.token_ids, other.token_ids) for seed, one, other in differing]
    unreported = [one.statistics.num_near_ties + other.statistics.num_near_ties == 0 for _, one, other in differing]
    statistics = [completion.statistics for completion in completions]
    drafted = sum(one.num_draft_tokens for one in statistics)
    return Comparison(
        setting=setting,
        texts=len(completions),
        differing=len(leads),
        unreported=sum(unreported),
        largest_lead=max(leads, default=0.0),
        near_ties=sum(one.num_near_ties for one in statistics),
        tokens=sum(one.num_generated_tokens for one in statistics),
        acceptance_rate=sum(one.num_accepted_tokens for one in statistics) / max(drafted, 1),
    )


def main() -> None:
    """Compares, prints, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    comparisons = []
    for comparison in compare(load_prompts()[: arguments.prompts], arguments.max_tokens):
        print(comparison, flush=True)
        comparisons.append(comparison)
    results = {
        "texts": sum(one.texts for one in comparisons),
        "tokens": sum(one.tokens for one in comparisons),
        "differing_texts": sum(one.differing for one in comparisons),
        "differing_texts_without_a_reported_near_tie": sum(one.unreported for one in comparisons),
        "largest_lead_where_texts_part": max(one.largest_lead for one in comparisons),
        "near_ties": sum(one.near_ties for one in comparisons),
        "settings": [asdict(one) for one in comparisons],
    }
    write_report(arguments, results)


if __name__ == "__main__":
    main()
