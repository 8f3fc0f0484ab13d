"""Cost of sending drafts, and of truncating their distributions: times, bytes, acceptance.

    python -m benchmarks.wire --output benchmarks/results/wire.json
    python -m benchmarks.wire --parts rules --prompts 60 --block-lengths 4 --output benchmarks/results/wire_rules.json

codec: how long a block of 8 takes to encode, and to decode and check, in one thread.
settings: the same positions of real text, with the embedded pair's distributions p and q, under every setting: the
    exact acceptance of a draft token, sum over tokens of min(p, q') with q' the distribution that would be drawn from
    and sent, and the bytes of q'. No token is drawn, so only the settings differ. Then the gain if the truncated mass
    were spread by a distribution that both sides hold.
rules: whole texts in one process, drafted from default and from dense distributions: acceptance rates, counted, and
    expected given the blocks (less noise).
socket: bytes on the drafter's connection to the verifier, HTTP/2 and gRPC framing, hello and pings included, TCP and
    IP headers not: with the embedded pair, and with a random pair of 151,936 tokens whose logits are Gaussian with the
    mean entropy of a language model.

Intervals are 95 %, by bootstrap over the prompts, paired.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.block_efficiency import PREDICTED, Estimate
from benchmarks.load import Ask, run_load
from benchmarks.prompts import load_prompts
from benchmarks.relay import Relay, free_port
from benchmarks.report import progress, read_metric, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import embedded_model
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.local_loop import LocalRun, speculate
from draftwire.method.distributions import DenseRows, quantize
from draftwire.method.encoding import NARROW, Claim, Supports, decode, encode_dense, encode_sparse
from draftwire.method.quantization import Encoding, Quantization, id_width
from draftwire.models.decoders import decoder_of
from draftwire.models.loading import load_model
from draftwire.models.torch_models import torch_model
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES, LawRule
from tests.tiny_models import save_tiny_model

PARTS = ("codec", "settings", "rules", "socket")
LARGE_VOCABULARY = 151_936
BLOCK_LENGTH, SUPPORT, BATCH = 8, 32, 16
"""Draft tokens of a block, tokens of a distribution, and blocks at once that the codec is timed with."""

TEMPERATURES = (1.0, 0.6, 0.2)
MASSES = (0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
CAPS = (8, 16, 32, 64, 128, 256, 512, 1024)
DEFAULT = Quantization()
DENSE = Quantization(Encoding.DENSE_FLOAT32)

ENTROPY = 1.75
"""Mean entropy of the random pair's distributions, nats."""
DISAGREEMENT = 0.7
"""Standard deviation of the difference of the random pair's logits."""

Sums = NDArray[np.float64]
"""`[prompts, 2]`: numerator and denominator of each prompt, such as accepted draft tokens and draft tokens."""


def ratio(own: Sums, base: Sums) -> Estimate:
    """Returns the ratio of two rates of the same prompts."""
    picked = np.random.default_rng(0).integers(0, len(own), (2_000, len(own)))
    rates = [sums[picked].sum(axis=1) for sums in (own, base)]
    resampled = (rates[0][:, 0] / rates[0][:, 1]) / (rates[1][:, 0] / rates[1][:, 1])
    return Estimate(rate(own) / rate(base), *np.percentile(resampled, [2.5, 97.5]).tolist())


def rate(sums: Sums) -> float:
    """Returns the rate of all prompts together."""
    return float(sums[:, 0].sum() / sums[:, 1].sum())


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints rows of the same columns."""
    cells = [[*rows[0]], *([_shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


# Codec


def measure_codec(repetitions: int) -> list[dict[str, Any]]:
    """Times encoding and decoding; everything per block, microseconds."""
    rows = []
    for name, num_blocks in (("sparse", 1), (f"sparse, {BATCH} at once", BATCH)):
        supports = _random_supports(num_blocks * BLOCK_LENGTH)
        lengths = [BLOCK_LENGTH] * num_blocks
        stated = encode_sparse(supports, lengths)
        firsts = supports.token_ids[:, 0].reshape(num_blocks, BLOCK_LENGTH).tolist()
        claims = [Claim(tokens, one) for tokens, one in zip(firsts, stated, strict=True)]
        assert all(isinstance(result, Supports) for result in decode(claims, LARGE_VOCABULARY))
        rows.append(
            {
                "encoding": name,
                "encode_us": median_us(partial(encode_sparse, supports, lengths), repetitions) / num_blocks,
                "decode_us": median_us(partial(decode, claims, LARGE_VOCABULARY), repetitions) / num_blocks,
                "bytes_per_token": len(stated[0].data) / BLOCK_LENGTH,
            }
        )
    probs = torch.randn(BLOCK_LENGTH, LARGE_VOCABULARY, generator=torch.Generator().manual_seed(0)).softmax(1).numpy()
    dense = encode_dense(Encoding.DENSE_FLOAT32, probs)
    claim = Claim([0] * BLOCK_LENGTH, dense)
    few = max(5, repetitions // 100)
    rows.append(
        {
            "encoding": "dense_float32",
            "encode_us": median_us(partial(encode_dense, Encoding.DENSE_FLOAT32, probs), few),
            "decode_us": median_us(partial(decode, [claim], LARGE_VOCABULARY), few),
            "bytes_per_token": len(dense.data) / BLOCK_LENGTH,
        }
    )
    return rows


def _random_supports(rows: int) -> Supports:
    """Returns distributions of `SUPPORT` tokens each."""
    generator = torch.Generator().manual_seed(0)
    quantized = quantize(
        (torch.randn(rows, LARGE_VOCABULARY, generator=generator) * 2.0).softmax(1), Quantization(max_support=SUPPORT)
    )
    assert int((quantized.weights > 0).sum()) == rows * SUPPORT
    return Supports(quantized.token_ids.numpy(), quantized.weights.numpy(), LARGE_VOCABULARY)


def median_us(call: Callable[[], object], repetitions: int) -> float:
    """Returns the median time of a call, microseconds."""
    for _ in range(repetitions // 10):
        call()
    times = []
    for _ in range(repetitions):
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1e3


# Settings


@dataclass(frozen=True, slots=True)
class Positions:
    """Next-token distributions of both models at positions of texts."""

    target: Tensor
    """`[positions, vocab] float32`."""
    draft: Tensor
    """`[positions, vocab] float32`."""
    prompts: NDArray[np.int64]
    """`[positions]`: index of each position's prompt."""

    def sums(self, values: Tensor) -> Sums:
        """Returns a quantity of each position, `[positions]`, by prompt."""
        both = [np.bincount(self.prompts, weights) for weights in (values.double().numpy(), np.ones(len(values)))]
        return np.stack(both, axis=1)


class Pair:
    """Two models in this process."""

    def __init__(self, target: str, drafter: str, context_length: int = 2048) -> None:
        """Loads them from their folders."""
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self._target, self._drafter = (
            torch_model(decoder_of(load_model(folder).model), context_length) for folder in (target, drafter)
        )
        self._context_length = context_length

    def drafter(self, quantization: Quantization) -> LanguageModelDrafter:
        """Returns a strategy that drafts from distributions of one kind."""
        return LanguageModelDrafter(self._drafter, self._context_length, quantization=quantization)

    def positions(self, prompts: list[str], temperature: float, num_tokens: int) -> Positions:
        """Continues prompts and keeps both models' distributions before every committed token but bonus tokens."""
        targets, drafts, numbers = [], [], []
        for number, prompt in enumerate(prompts):
            run = LocalRun(SamplingParams(temperature), num_tokens, 4, "block", number)
            for done in speculate(self._target, self.drafter(DENSE), self.tokenizer(prompt)["input_ids"], run):
                blocks = done.blocks
                kept = min(int(blocks.lengths[0]), done.num_accepted + 1)
                if kept:
                    assert isinstance(blocks.draft, DenseRows)
                    targets.append(blocks.target_probs[blocks.target_rows[0, :kept]].float())
                    drafts.append(blocks.draft.probs[blocks.draft_rows[0, :kept]])
                    numbers += [number] * kept
        return Positions(torch.cat(targets), torch.cat(drafts), np.array(numbers))

    def acceptance(self, prompt: str, run: LocalRun, quantization: Quantization) -> tuple[float, float, int]:
        """Continues a prompt; returns draft tokens accepted, expected to be accepted given the blocks, and drafted."""
        accepted, expected, drafted = 0, 0.0, 0
        rule = RULES[run.rule]
        assert isinstance(rule, LawRule), "only such rules are predicted"
        for done in speculate(self._target, self.drafter(quantization), self.tokenizer(prompt)["input_ids"], run):
            if length := int(done.blocks.lengths[0]):
                accepted += done.num_accepted
                expected += float(rule.stop_law(done.blocks).expected_accepted()[0])
                drafted += length
        return float(accepted), expected, drafted


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a drafter's encoding."""

    mass: float
    cap: int
    bits: int = 16


DEFAULT_SETTING = Setting(DEFAULT.mass, DEFAULT.max_support)
SETTINGS = [Setting(mass, cap) for mass, cap in product(MASSES, CAPS)] + [
    Setting(DEFAULT.mass, cap, bits) for bits, cap in product((8, 12), (16, 64))
]


def judge_setting(positions: Positions, setting: Setting) -> dict[str, Any]:
    """Returns the exact acceptance and the size of the distributions under one setting."""
    total = 2**setting.bits
    quantized = quantize(positions.draft, Quantization(mass=setting.mass, max_support=setting.cap), total)
    own = (positions.target.gather(1, quantized.token_ids)).minimum(quantized.weights / total).sum(dim=1)
    dense = positions.target.minimum(positions.draft).sum(dim=1)
    support = (quantized.weights > 0).sum(dim=1)
    wide = (quantized.weights > NARROW).sum(dim=1)
    # Both numbers are varints of one byte, of two from 128 on.
    varints = 2 + (support >= 128).to(torch.int64) + (wide >= 128)
    sizes = support * (id_width(positions.draft.shape[1]) + 1) + wide * (setting.bits / 8 - 1) + varints
    return {
        **asdict(setting),
        "acceptance": float(own.double().mean()),
        "ratio": ratio(positions.sums(own), positions.sums(dense)),
        "mean_support": float(support.double().mean()),
        "bytes_per_position": float(sizes.double().mean()),
        "share_capped": float((support == setting.cap).double().mean()),
    }


def judge_tail(positions: Positions, others: Positions, cap: int) -> dict[str, Any]:
    """Returns the gain if the truncated mass were spread by a distribution that both sides hold.

    That distribution is the mean of the truncated parts, under the same cap, at the positions of other texts.
    """
    kept = positions.draft.topk(cap, dim=1)
    left_out = others.draft.scatter(1, others.draft.topk(cap, dim=1).indices, 0.0).mean(dim=0)
    tails = left_out.expand_as(positions.draft).scatter(1, kept.indices, 0.0)
    tails *= (1.0 - kept.values.sum(dim=1, keepdim=True)) / tails.sum(dim=1, keepdim=True)
    dense = positions.target.minimum(positions.draft).sum(dim=1)
    with_tail = positions.target.minimum(tails.scatter(1, kept.indices, kept.values)).sum(dim=1)
    without = positions.target.gather(1, kept.indices).minimum(kept.values / kept.values.sum(dim=1, keepdim=True))
    ratios = [ratio(positions.sums(own), positions.sums(dense)) for own in (with_tail, without.sum(dim=1))]
    return {"cap": cap, "ratio_with_tail": ratios[0], "ratio_without": ratios[1]}


def shape(positions: Positions) -> dict[str, float]:
    """Returns statistics of the drafter's distributions."""
    draft = positions.draft
    return {
        "positions": float(len(draft)),
        "draft_entropy_nats": float(torch.special.entr(draft).sum(dim=1).mean()),
        "target_entropy_nats": float(torch.special.entr(positions.target).sum(dim=1).mean()),
        "draft_top1": float(draft.amax(dim=1).mean()),
        "dense_acceptance": float(positions.target.minimum(draft).sum(dim=1).mean()),
    }


def measure_settings(pair: Pair, prompts: list[str], others: list[str], num_tokens: int) -> dict[str, Any]:
    """Measures all settings at all temperatures, and a tail estimated from other prompts."""
    report: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        positions = pair.positions(prompts, temperature, num_tokens)
        report[f"shape at T={temperature}"] = shape(positions)
        rows = [judge_setting(positions, setting) for setting in SETTINGS]
        report[f"settings at T={temperature}"] = rows
        print_table(f"T = {temperature}: {shape(positions)}", rows)
        if temperature == TEMPERATURES[0]:
            learnt = pair.positions(others, temperature, num_tokens)
            report["tails"] = [judge_tail(positions, learnt, cap) for cap in CAPS]
            print_table(f"T = {temperature}: what is left out spread by a law that both sides hold", report["tails"])
    return report


# Rules


def measure_rules(pair: Pair, prompts: list[str], num_tokens: int, block_lengths: list[int]) -> list[dict[str, Any]]:
    """Compares default with dense distributions over whole texts, at temperature 1."""
    rows = []
    for rule, block_length in product(PREDICTED, block_lengths):
        kinds = []
        for quantization in (DEFAULT, DENSE):
            runs = [
                pair.acceptance(prompt, LocalRun(SamplingParams(), num_tokens, block_length, rule, seed), quantization)
                for seed, prompt in enumerate(progress(prompts, f"{rule}, blocks of {block_length}"))
            ]
            kinds.append(np.array(runs, dtype=np.float64))
        own, dense = kinds
        rows.append(
            {
                "rule": rule,
                "block_length": block_length,
                "acceptance": rate(own[:, [0, 2]]),
                "dense_acceptance": rate(dense[:, [0, 2]]),
                "ratio": ratio(own[:, [0, 2]], dense[:, [0, 2]]),
                "expected_ratio": ratio(own[:, [1, 2]], dense[:, [1, 2]]),
                "draft_tokens": int(own[:, 2].sum()),
            }
        )
    return rows


# Socket


def gaussian_rows(spread: float, rows: int = 64) -> Tensor:
    """Returns distributions of Gaussian logits, the same noise every time."""
    noise = torch.randn(rows, LARGE_VOCABULARY, generator=torch.Generator().manual_seed(0))
    return (noise * spread).softmax(dim=1)


def spread_of_entropy(entropy: float) -> float:
    """Returns the standard deviation of Gaussian logits whose distributions have a mean entropy, nats."""
    low, high = 1.0, 20.0
    for _ in range(12):
        middle = (low + high) / 2
        is_flatter = float(torch.special.entr(gaussian_rows(middle)).sum(dim=1).mean()) > entropy
        low, high = (middle, high) if is_flatter else (low, middle)
    return (low + high) / 2


def sizes_by_entropy() -> list[dict[str, Any]]:
    """Returns the encoded sizes of Gaussian logits of several spreads at default settings."""
    rows = []
    for entropy in (0.5, 1.0, 1.5, ENTROPY, 2.0, 2.5):
        spread = spread_of_entropy(entropy)
        probs = gaussian_rows(spread)
        judged = judge_setting(Positions(probs, probs, np.arange(len(probs))), DEFAULT_SETTING)
        kept = ("mean_support", "bytes_per_position", "share_capped")
        top = float(probs.amax(dim=1).mean())
        rows.append({"entropy": entropy, "spread": spread, "top1": top, **{key: judged[key] for key in kept}})
    return rows


def save_random_pair(folder: Path) -> tuple[str, str]:
    """Writes two models of `LARGE_VOCABULARY` tokens that differ in their output weights; returns their folders."""
    spread = spread_of_entropy(ENTROPY)
    target = save_tiny_model(folder / "target", LARGE_VOCABULARY, context_length=2048, sharpness=4.0 * spread)
    drafter = save_tiny_model(folder / "drafter", LARGE_VOCABULARY, context_length=2048, sharpness=4.0 * spread)
    model = LlamaForCausalLM.from_pretrained(drafter)
    weights = model.lm_head.weight.data
    likeness = 1.0 - 0.5 * (DISAGREEMENT / spread) ** 2  # logits of the same spread
    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)) * weights.std()
    weights.mul_(likeness).add_(noise, alpha=(1.0 - likeness**2) ** 0.5)
    model.save_pretrained(drafter)
    return str(target), str(drafter)


def measure_socket(target: str, drafter: str, prompts: list[str], num_tokens: int) -> list[dict[str, Any]]:
    """Returns the bytes that the drafter sent, load by load; those before the first load, in the first row alone."""
    port = free_port()
    rows = []
    with Relay(port) as relay:
        options: dict[str, dict[str, object]] = {
            "verifier": {"model": target, "port": port},
            "drafter": {"model": drafter},
            "gateway": {"verifier": f"127.0.0.1:{relay.port}"},
        }
        with LocalStack(options) as stack:
            of_gateway = len(relay.connections)
            before = Counted(0, 0, 0, 0)
            for concurrency, block_length in product((1, 8), (4, 8)):
                asks = [
                    Ask(prompt, num_tokens, block_length, seed)
                    for seed, prompt in enumerate(prompts[: max(4, 2 * concurrency)])
                ]
                run_load(stack.address, asks, concurrency)
                time.sleep(0.5)  # messages in flight arrive
                of_drafter = relay.connections[of_gateway:]
                assert len(of_drafter) == 1, "the drafter opens one connection"
                now = Counted.read(stack.services["verifier"].metrics_port, of_drafter[0].sent)
                rows.append({"sessions": concurrency, "block_length": block_length, **now.since(before)})
                before = now
            rows.append({"sessions": "all", "block_length": "all", **before.since(Counted(0, 0, 0, 0))})
    return rows


@dataclass(frozen=True, slots=True)
class Counted:
    """Counters of a stack."""

    socket_bytes: int
    draft_tokens: int
    message_bytes: int
    """By the verifier's own count."""
    emitted_tokens: int

    @classmethod
    def read(cls, metrics_port: int, socket_bytes: int) -> "Counted":
        """Reads the verifier's metrics."""
        names = ("spec_decode_num_draft_tokens", "spec_decode_num_draft_bytes", "generation_tokens")
        return cls(socket_bytes, *(int(read_metric(metrics_port, f"{name}_total")) for name in names))

    def since(self, before: "Counted") -> dict[str, Any]:
        """Returns the differences from earlier counters, and rates."""
        socket_bytes, tokens = self.socket_bytes - before.socket_bytes, self.draft_tokens - before.draft_tokens
        message_bytes = self.message_bytes - before.message_bytes
        emitted = self.emitted_tokens - before.emitted_tokens
        return {
            "socket_bytes": socket_bytes,
            "draft_tokens": tokens,
            "socket_bytes_per_draft_token": socket_bytes / tokens,
            "socket_bytes_per_emitted_token": socket_bytes / emitted,
            "metric_bytes_per_emitted_token": message_bytes / emitted,
        }


def measure_sockets(prompts: list[str], num_tokens: int) -> dict[str, Any]:
    """Measures both pairs."""
    report: dict[str, Any] = {"sizes_by_entropy": sizes_by_entropy()}
    print_table("Gaussian logits of 151,936 tokens at default settings", report["sizes_by_entropy"])
    embedded = (embedded_model("target"), embedded_model("drafter"))
    report["socket_embedded_pair"] = measure_socket(*embedded, prompts, num_tokens)
    print_table("Bytes from drafter to verifier, embedded pair", report["socket_embedded_pair"])
    with tempfile.TemporaryDirectory() as folder:
        random_pair = save_random_pair(Path(folder))
        random = np.random.default_rng(0)
        texts = [" ".join(f"t{token}" for token in random.integers(0, LARGE_VOCABULARY, 64)) for _ in range(16)]
        positions = Pair(*random_pair).positions(texts[:4], 1.0, min(num_tokens, 64))
        report["random_pair"] = {
            **shape(positions),
            "default": judge_setting(positions, DEFAULT_SETTING),
        }
        print(f"\nrandom pair of {LARGE_VOCABULARY} tokens: {report['random_pair']}")
        report["socket_random_pair"] = measure_socket(*random_pair, texts, num_tokens)
    print_table("Bytes from drafter to verifier, random pair", report["socket_random_pair"])
    return report


def main() -> None:
    """Measures, prints tables, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["codec", "settings", "socket"])
    parser.add_argument("--repetitions", type=int, default=5_000, help="of the codec's calls")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--block-lengths", type=int, nargs="+", default=[4, 8], help="for rules")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prompts, num_tokens = load_prompts()[: arguments.prompts], arguments.max_tokens
    pair = Pair(embedded_model("target"), embedded_model("drafter"))
    report: dict[str, Any] = {}
    if "codec" in arguments.parts:
        report["codec"] = measure_codec(arguments.repetitions)
        print_table("Codec, microseconds per block of 8, 151,936 tokens", report["codec"])
    if "settings" in arguments.parts:
        half = len(prompts) // 2
        report |= measure_settings(pair, prompts[:half], prompts[half:], num_tokens)
    if "rules" in arguments.parts:
        report["rules"] = measure_rules(pair, prompts, num_tokens, arguments.block_lengths)
        print_table("Default against dense distributions, T = 1", report["rules"])
    if "socket" in arguments.parts:
        report |= measure_sockets(prompts, num_tokens)
    write_report(arguments, report)


if __name__ == "__main__":
    main()
