"""Whether the services write at temperature 0 what transformers writes with the same model, in float32.

    python -m benchmarks.same_texts --target smollm2 --output benchmarks/results/same_texts.json

Questions are answered by transformers' own `generate`, and by the services with drafts as chosen and without. Where a
text parts, the lead is told that the token of transformers had there over the other one, in logits: below 1e-4 it is a
near-tie.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.questions import QUESTIONS
from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import CHAT_MODEL, folder_of
from draftwire.cli.stack_options import NO_DRAFTER, Computing, stack_options
from draftwire.client import Client

WEIGHTS = {"draftwire": None, "openvino": "f32"}
"""How each engine stores weights, in float32."""
NEAR_TIE = 1e-4
"""Logits. A smaller lead may be lost by rounding."""


class Reference:
    """Transformers' model in float32."""

    def __init__(self, folder: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt(self, question: str) -> list[int]:
        """Returns the ids of a question, by the model's template."""
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    @torch.inference_mode()
    def text(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Returns the ids that the model generates."""
        ids = torch.tensor([prompt])
        made = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
        )
        found: list[int] = made[0, len(prompt) :].tolist()
        return found

    @torch.inference_mode()
    def lead(self, prompt: list[int], wanted: list[int], given: list[int]) -> float | None:
        """Returns the lead of the token where two texts part, logits; None if they do not."""
        for place, (one, other) in enumerate(zip(wanted, given, strict=False)):
            if one != other:
                logits: Tensor = self._model(torch.tensor([prompt + wanted[:place]])).logits[0, -1]
                return float(logits[one] - logits[other])
        return None


def main() -> None:
    """Compares, and prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=CHAT_MODEL)
    parser.add_argument("--engines", nargs="+", choices=tuple(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()[: arguments.questions]
    reference = Reference(folder_of(arguments.target))
    prompts = [reference.prompt(json.loads(line)["question"]) for line in lines]
    wanted = [reference.text(prompt, arguments.max_tokens) for prompt in progress(prompts, "transformers")]
    results: dict[str, Any] = {}
    for engine in arguments.engines:
        options = stack_options(arguments.target, NO_DRAFTER, None, None, Computing(engine, WEIGHTS[engine]))
        options["verifier"]["dtype"] = "float32"
        with LocalStack(options, start_timeout_s=600.0) as stack, Client(stack.address) as client:
            for way, length in (("chosen", None), ("plain", 0)):
                how: dict[str, Any] = {"temperature": 0.0, "max_tokens": arguments.max_tokens}
                texts = [client.generate(one, num_speculative_tokens=length, **how).token_ids for one in prompts]
                leads = [reference.lead(*each) for each in zip(prompts, wanted, texts, strict=True)]
                parted = [lead for lead in leads if lead is not None]
                results[f"{engine}, {way}"] = {
                    "equal": leads.count(None),
                    "leads": parted,
                    "near_ties": sum(abs(lead) < NEAR_TIE for lead in parted),
                }
                print(f"{engine}, {way}: equal {leads.count(None)} of {len(leads)}; leads where they part {parted}")
    write_report(arguments, results)


if __name__ == "__main__":
    main()
