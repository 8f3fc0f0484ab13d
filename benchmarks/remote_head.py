"""What a head away from its target costs: bytes of features at the socket, and acceptance by their encoding.

    draftwire train eagle3 --target models/target --data texts.txt --out /tmp/head --tokens 200000 --compiled
    python -m benchmarks.remote_head --head /tmp/head --output benchmarks/results/remote_head.json

Drafter, verifier and gateway are processes, and the drafter's connection passes a relay that counts. Texts are of
fixed seeds under the rule coupled, and at temperature 0: with every encoding they are the same, so that acceptance is
compared in the same places. Intervals are 95 %, by bootstrap over the prompts, paired with float32.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prompts import load_prompts
from benchmarks.relay import Relay, free_port
from benchmarks.report import write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.up_command import embedded_model
from draftwire.client import Client
from draftwire.method.feature_format import FeatureEncoding

BLOCK_LENGTH = 4
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Run:
    """The prompts with one encoding at one temperature."""

    accepted: list[int]
    """Of each prompt."""
    drafted: list[int]
    emitted: int
    received_bytes: int
    """On the drafter's connection, from the verifier: features, and HTTP/2 and gRPC around them."""
    prompt_tokens: int
    texts: list[list[int]]

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens."""
        return sum(self.accepted) / sum(self.drafted)


def measure(options: dict[str, object], encoding: FeatureEncoding, prompts: Sequence[str], tokens: int) -> list[Run]:
    """Returns a run at temperature 0 and one at 1, through processes of their own."""
    port, runs = free_port(), []
    with Relay(port) as relay:
        stack_options: dict[str, dict[str, object]] = {
            "verifier": {"model": options["target"], "feature_head": options["head"], "port": port, "dtype": "float32"},
            "drafter": {
                "model": options["target"],
                "head": options["head"],
                "strategy": options["strategy"],
                "feature_encoding": encoding.value,
            },
            "gateway": {"verifier": f"127.0.0.1:{relay.port}", "local_drafts": "none"},
        }
        with LocalStack(stack_options) as stack, Client(stack.address) as client:
            of_gateway = len(relay.connections)
            for temperature in (0.0, 1.0):
                before = sum(one.received for one in relay.connections[of_gateway:])
                done = [
                    client.generate(
                        prompt,
                        max_tokens=tokens,
                        seed=seed,
                        temperature=temperature,
                        num_speculative_tokens=BLOCK_LENGTH,
                        rejection_sample_method="coupled",
                        ignore_eos=True,
                    )
                    for seed, prompt in enumerate(prompts)
                ]
                time.sleep(0.5)  # messages in flight arrive
                told = [one.statistics for one in done]
                runs.append(
                    Run(
                        [one.num_accepted_tokens for one in told],
                        [one.num_draft_tokens for one in told],
                        sum(one.num_emitted_tokens for one in told),
                        sum(one.received for one in relay.connections[of_gateway:]) - before,
                        sum(one.num_prompt_tokens for one in told),
                        [list(one.token_ids) for one in done],
                    )
                )
    return runs


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
    runs = {each: measure(options, each, prompts, arguments.max_tokens) for each in FeatureEncoding}
    report: list[dict[str, Any]] = []
    for encoding, own in runs.items():
        for temperature, run, base in zip((0.0, 1.0), own, runs[FeatureEncoding.FLOAT32], strict=True):
            loss, margin = lost(run, base)
            row = {
                "encoding": encoding.value,
                "temperature": temperature,
                "acceptance": run.acceptance,
                "lost_acceptance": loss,
                "margin": margin,
                "draft_tokens": sum(run.drafted),
                "socket_bytes": run.received_bytes,
                "socket_bytes_per_token": run.received_bytes / (run.prompt_tokens + run.emitted),
                "same_texts": run.texts == base.texts,
            }
            report.append(row)
            print(
                f"{encoding.value}, T = {temperature:g}: accepted {run.acceptance:.3f}, {loss:+.4f} ± {margin:.4f} "
                f"less than with float32; {row['socket_bytes_per_token']:.0f} bytes a token of prompt and text"
            )
    write_report(arguments, {"runs": report})


if __name__ == "__main__":
    main()
