"""What a head away from its target costs: bytes of features at the socket, and acceptance by their encoding.

    draftwire train eagle3 --target models/target --data texts.txt --out /tmp/head --tokens 200000
    python -m benchmarks.remote_head --head /tmp/head --output benchmarks/results/remote_head.json

Drafter, verifier and gateway are processes, and the drafter's connection passes a relay that counts. Texts are of
fixed seeds under the rule coupled, and at temperature 0: with every encoding they are the same, so that acceptance is
compared in the same places. Intervals are 95 %, by bootstrap over the prompts, paired with float32.

What a token of the text costs is what longer texts of the same prompts take more, at temperature 0, by how many tokens
they have more; what is left of the shorter ones is the prompts'.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prompts import load_prompts
from benchmarks.relay import Relay, free_port
from benchmarks.report import read_metric, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import embedded_model
from draftwire.client import Client
from draftwire.options.heads.feature_format import FeatureEncoding

BLOCK_LENGTH = 4
RESAMPLES = 2000
SHORT_TOKENS = 8
"""Of the texts that are mostly prompt."""


@dataclass(frozen=True, slots=True)
class Run:
    """Some texts of the prompts, at one temperature."""

    accepted: list[int]
    """Of each prompt."""
    drafted: list[int]
    emitted: int
    received_bytes: int
    """On the drafter's connection, from the verifier: features, and HTTP/2 and gRPC around them."""
    feature_bytes: int
    """Of these, features, as the verifier counts them."""
    prompt_tokens: int
    texts: list[list[int]]

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens."""
        return sum(self.accepted) / sum(self.drafted)


@dataclass(frozen=True, slots=True)
class Measured:
    """The runs with one encoding, through processes of their own."""

    short: Run
    """At temperature 0, of `SHORT_TOKENS`."""
    long: Mapping[float, Run]
    """By temperature."""

    @property
    def bytes_per_token(self) -> tuple[float, float]:
        """Bytes at the socket of a token of the prompt, and of one of the text."""
        more = self.long[0.0]
        of_text = (more.received_bytes - self.short.received_bytes) / (more.emitted - self.short.emitted)
        return (self.short.received_bytes - of_text * self.short.emitted) / self.short.prompt_tokens, of_text


def measure(options: dict[str, object], encoding: FeatureEncoding, prompts: Sequence[str], tokens: int) -> Measured:
    """Runs the prompts, short ones and long ones."""
    port = free_port()
    with Relay(port) as relay:
        stack_options: dict[str, dict[str, object]] = {
            "verifier": {"model": options["target"], "feature_head": options["head"], "port": port, "dtype": "float32"},
            "drafter": {
                "model": options["target"],
                "head": options["head"],
                "strategy": options["strategy"],
                "feature_encoding": encoding.value,
            },
            "gateway": {"verifier": f"127.0.0.1:{relay.port}", "local_drafts": "none", "speculation": "fixed"},
        }
        with LocalStack(stack_options) as stack, Client(stack.address) as client:
            of_gateway = len(relay.connections)

            def counts() -> tuple[int, int]:
                time.sleep(0.5)  # messages in flight arrive
                received = sum(one.received for one in relay.connections[of_gateway:])
                return received, int(read_metric(stack.services["verifier"].metrics_port, "feature_bytes_total"))

            def run(temperature: float, max_tokens: int) -> Run:
                before = counts()
                done = [
                    client.generate(
                        prompt,
                        max_tokens=max_tokens,
                        seed=seed,
                        temperature=temperature,
                        num_speculative_tokens=BLOCK_LENGTH,
                        rejection_sample_method="coupled",
                        ignore_eos=True,
                    )
                    for seed, prompt in enumerate(prompts)
                ]
                received, features = (after - old for after, old in zip(counts(), before, strict=True))
                told = [one.statistics for one in done]
                return Run(
                    [one.num_accepted_tokens for one in told],
                    [one.num_draft_tokens for one in told],
                    sum(one.num_emitted_tokens for one in told),
                    received,
                    features,
                    sum(one.num_prompt_tokens for one in told),
                    [list(one.token_ids) for one in done],
                )

            return Measured(
                run(0.0, SHORT_TOKENS), {temperature: run(temperature, tokens) for temperature in (0.0, 1.0)}
            )


def lost(run: Run, base: Run) -> tuple[float, float]:
    """Returns by how much less is accepted than in a run with float32, and half the interval of that."""
    counts = np.array([run.accepted, run.drafted, base.accepted, base.drafted])
    chosen = np.random.default_rng(0).integers(0, counts.shape[1], (RESAMPLES, counts.shape[1]))
    own, drafted, others, others_drafted = counts[:, chosen].sum(-1)
    low, high = np.quantile(others / others_drafted - own / drafted, [0.025, 0.975])
    return base.acceptance - run.acceptance, float(high - low) / 2


def main() -> None:
    """Measures, prints a line for each encoding and temperature, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--head", required=True)
    parser.add_argument("--strategy", default="eagle3")
    parser.add_argument("--target", default=embedded_model("target"))
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    options = {"target": arguments.target, "head": arguments.head, "strategy": arguments.strategy}
    prompts = load_prompts()[: arguments.prompts]
    measured = {each: measure(options, each, prompts, arguments.max_tokens) for each in FeatureEncoding}
    report: list[dict[str, Any]] = []
    for encoding, own in measured.items():
        of_prompt, of_text = own.bytes_per_token
        runs = {}
        for temperature, run in own.long.items():
            base = measured[FeatureEncoding.FLOAT32].long[temperature]
            loss, margin = lost(run, base)
            runs[f"{temperature:g}"] = {
                "acceptance": run.acceptance,
                "lost_acceptance": loss,
                "margin": margin,
                "draft_tokens": sum(run.drafted),
                "socket_bytes": run.received_bytes,
                "feature_bytes": run.feature_bytes,
                "same_texts": run.texts == base.texts,
            }
            print(
                f"{encoding.value}, T = {temperature:g}: accepted {run.acceptance:.3f}, {loss:+.4f} ± {margin:.4f} "
                f"less than with float32, of {sum(run.drafted):,} draft tokens"
            )
        print(f"{encoding.value}: {of_prompt:.0f} bytes at the socket for a token of a prompt, {of_text:.0f} of a text")
        report.append(
            {
                "encoding": encoding.value,
                "socket_bytes_per_prompt_token": of_prompt,
                "socket_bytes_per_text_token": of_text,
                "by_temperature": runs,
            }
        )
    write_report(arguments, {"encodings": report})


if __name__ == "__main__":
    main()
