"""Tokens per forward pass of the target with token trees, by shape and rule; `benchmarks.block_efficiency --trees`.

Every prompt is continued in this process, once for each shape, rule and temperature. What a planned shape expects of a
rank, and how far racers are trusted, comes from other prompts: there the rank of the target's token among the drafter's
is counted at each place of the target's own text.
"""

import argparse
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer
from typing_extensions import override

from benchmarks.planned_trees import ShapedGrowth, shape_by_acceptance
from benchmarks.report import progress
from draftwire.method.distributions import DraftRows, SparseRows, no_rows, quantize
from draftwire.method.encoding import TOTAL_WEIGHT
from draftwire.method.keys import DrawKey, Role, derive_key
from draftwire.method.quantization import Quantization
from draftwire.method.randomness import exponentials, uniforms
from draftwire.method.sampling import probabilities
from draftwire.models.cached_model import CachedModel
from draftwire.models.sequence_model import Reading
from draftwire.options.trees.growth_plan import GrowthPlan
from draftwire.options.trees.token_tree import ROOT, TokenTree
from draftwire.options.trees.tree_choice import TREE_RULES
from draftwire.options.trees.tree_growth import BestFirstGrowth, log_race_chances
from draftwire.options.trees.tree_rule import verify_trees
from draftwire.options.trees.trees import TreeBatch
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import KeyedNoise
from examples.rules.multi_round import MultiRoundRule, WithoutReplacementRule

Counts = NDArray[np.float64]
"""`[prompts, 3]`: accepted draft tokens, rounds, and draft tokens, per prompt."""

BLOCK_LENGTH = 8
DEPTH = 10
"""Draft tokens on a path of a tree at most."""
RANKS = 16
"""Children of a token at most, in planned shapes."""
CALIBRATION_PROMPTS = 8
SIZES = (16, 32, 64)
SHARPNESSES = tuple(0.5 + 0.125 * step for step in range(29))
CPU = torch.device("cpu")
JUDGES = {**TREE_RULES, **{rule.name: rule for rule in (MultiRoundRule(), WithoutReplacementRule())}}
"""Rules for trees by name, also those that are only studied."""


@dataclass(frozen=True, slots=True)
class MeasuredPlan(GrowthPlan):
    """A plan of a kind that is measured and not served."""

    revisits: bool = False
    """Whether nodes that were left out of a pass may be read in a later one."""
    least_gain: float = 0.0
    """The tree ends once a pass adds less than this to the accepted tokens that it promises."""


class MeasuredGrowth(BestFirstGrowth):
    """Grows the tree of a `MeasuredPlan`."""

    def __init__(self, plan: MeasuredPlan) -> None:
        """Starts at the root."""
        super().__init__(plan)
        self._measured = plan
        self._promised = 0.0

    @override
    def _may_read(self, node: int) -> bool:
        return self._measured.revisits or super()._may_read(node)

    @override
    def expand(self, nodes: Sequence[int], log_chances: Tensor) -> None:
        super().expand(nodes, log_chances)
        promised = sum(math.exp(self._scores[node]) for node in self._best)
        self._is_over = promised - self._promised < self._measured.least_gain
        self._promised = promised


def growth_of(plan: GrowthPlan) -> BestFirstGrowth:
    """Returns a tree that grows by a plan, at its root."""
    return MeasuredGrowth(plan) if isinstance(plan, MeasuredPlan) else BestFirstGrowth(plan)


def opt_tree(num_nodes: int, depth: int, least_gain: float) -> MeasuredPlan:
    """Returns the plan of OPT-Tree (Wang et al. 2024, arXiv 2406.17276, Algorithm 1): all nodes that the best tree so
    far has at its last depth get children, until a pass no longer pays.

    Args:
        num_nodes: draft tokens.
        depth: draft tokens on a path.
        least_gain: what a pass has to add to the accepted tokens that the tree promises.
    """
    return MeasuredPlan(num_nodes, depth, num_nodes, num_nodes, depth, least_gain=least_gain)


def spec_exec(num_nodes: int, depth: int, per_pass: int, num_passes: int) -> MeasuredPlan:
    """Returns the plan of SpecExec (Svirschevski et al. 2024, arXiv 2406.02532, Algorithm 2): the best nodes of all
    depths that were not read yet, pass after pass, for large trees.
    """
    return MeasuredPlan(num_nodes, depth, num_nodes, per_pass, num_passes, revisits=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """The pair, and how both draw."""

    target: CachedModel
    drafter: CachedModel
    sampling: SamplingParams
    quantization: Quantization
    """Of the drafter's distributions, where the rule reads them."""


@dataclass(frozen=True, slots=True)
class Arm:
    """How trees are drafted and judged."""

    name: str
    rule: str
    """One of `JUDGES`."""
    shape: TokenTree | None = None
    """The shape, if it is planned."""
    plan: GrowthPlan | None = None
    """How the tree grows, if it is not."""
    sharpness: float = 1.0
    """See `log_race_chances`."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """A tree with what its tokens were drawn from."""

    token_ids: list[int]
    shape: TokenTree
    rows: DraftRows
    cached: tuple[int, ...]
    """What the drafter's cache calls each node; -1 for those that it has not read."""


class Text:
    """A text that is continued in rounds."""

    def __init__(self, setting: Setting, ids: Sequence[int], seed: int) -> None:
        """Starts with a prompt."""
        self.ids = list(ids)
        self._setting, self._seed = setting, seed
        self._judged = setting.target.cache.open(self.ids)
        self._drafted = setting.drafter.cache.open(self.ids)

    def close(self) -> None:
        """Frees both caches."""
        self._setting.target.cache.close(self._judged)
        self._setting.drafter.cache.close(self._drafted)

    def round(self, number: int, arm: Arm) -> tuple[int, int]:
        """Drafts and judges a tree; returns how many tokens were accepted, and of how many."""
        rule, setting = JUDGES[arm.rule], self._setting
        tree = self._draft(number, arm)
        token_ids = [*self.ids[self._judged.length :], *tree.token_ids]
        reading = Reading(self._judged, token_ids, len(tree.shape) + 1, tree.shape.parents)
        probs = probabilities(setting.target.read([reading]), setting.sampling)
        batch = TreeBatch.packed(probs, [tree.rows], [tree.token_ids], [tree.shape], [0])
        role = Role.COUPLING if rule.is_coupled else Role.VERIFYING
        noise = KeyedNoise([DrawKey(derive_key(self._seed, role), 0, number)], [len(self.ids)], CPU)
        outcome = verify_trees(rule, batch, noise)
        path = tree.shape.path_to(int(outcome.last_nodes[0]))
        setting.target.keep_path(self._judged, path)
        known = [tree.cached[node] for node in path]
        setting.drafter.keep_path(self._drafted, known[: known.index(-1)] if -1 in known else known)
        self.ids += [*(tree.token_ids[node] for node in path), int(outcome.extra_tokens[0])]
        return len(path), len(tree.shape)

    def _draft(self, number: int, arm: Arm) -> Drafted:
        """Drafts a tree, one forward pass of the drafter for each depth or each pass of the plan."""
        rule, sampling = JUDGES[arm.rule], self._setting.sampling
        drawn = rule.needs_draft_probs
        shaped = ShapedGrowth(arm.shape) if arm.shape is not None else None
        best = growth_of(arm.plan) if arm.plan is not None else None
        growth = shaped or best
        assert growth is not None, "an arm has a shape or a plan"
        places: dict[int, int] = {}
        depths = {ROOT: 0}
        rows: dict[int, tuple[Tensor, Tensor]] = {}
        numbers = uniforms([DrawKey(derive_key(self._seed, Role.DRAFTING), 0, number)], RANKS * DEPTH * max(SIZES))[0]
        used = 0
        words = torch.tensor([DrawKey(derive_key(self._seed, Role.COUPLING), 0, number).text_words])
        while nodes := growth.frontier():
            logits = self._read(growth, nodes, places)
            for node in nodes:
                depths[node] = 0 if node == ROOT else depths[growth.parent(node)] + 1
            probs = torch.softmax(logits.float(), dim=-1) if sampling.greedy else probabilities(logits, sampling)
            scores = probs.double().log()
            if rule.is_coupled and not sampling.greedy:
                positions = torch.tensor([len(self.ids) + depths[node] for node in nodes])
                times = exponentials(words.expand(len(nodes), -1), positions, probs.shape[1])
                scores = log_race_chances(scores, times, arm.sharpness)
            if best is not None:
                best.expand(nodes, scores)
                continue
            assert shaped is not None, "no shape and no plan"
            widths = [shaped.width(node) for node in nodes]
            if drawn:
                quantized = quantize(probs, self._setting.quantization)
                wanted = numbers[used : used + len(nodes) * max(widths)].reshape(len(nodes), -1)
                used += wanted.numel()
                tokens = quantized.draw_distinct(wanted).tolist()
                rows.update(zip(nodes, zip(quantized.token_ids, quantized.weights, strict=True), strict=True))
            else:
                tokens = scores.topk(max(widths), dim=1).indices.tolist()
            pairs = zip(tokens, widths, strict=True)
            shaped.expand(nodes, [[token for token in own[:width] if token >= 0] for own, width in pairs])
        grown = growth.grown()
        shape = TokenTree(grown.parents)
        vocab_size = self._setting.target.vocab_size
        stated: DraftRows = no_rows(vocab_size)
        if drawn and grown.token_ids:
            own = [rows[ROOT if node == ROOT else grown.numbers[node]] for node in shape.inner_nodes]
            weights = torch.stack([weights for _, weights in own]).float() / TOTAL_WEIGHT
            stated = SparseRows(torch.stack([ids for ids, _ in own]), weights, vocab_size)
        return Drafted(grown.token_ids, shape, stated, tuple(places.get(node, -1) for node in grown.numbers))

    def _read(self, growth: ShapedGrowth | BestFirstGrowth, nodes: list[int], places: dict[int, int]) -> Tensor:
        """Returns the drafter's logits after nodes, `[nodes, vocab]`, and notes what its cache calls them."""
        if nodes == [ROOT]:
            return self._setting.drafter.read([Reading(self._drafted, self.ids[self._drafted.length :], 1)])
        parents = tuple(places.get(growth.parent(node), ROOT) for node in nodes)
        token_ids = [growth.token(node) for node in nodes]
        places.update(zip(nodes, range(len(places), len(places) + len(nodes)), strict=True))
        return self._setting.drafter.read([Reading(self._drafted, token_ids, len(nodes), parents)])


@dataclass(frozen=True, slots=True)
class Calibration:
    """What other prompts show of a pair at a temperature."""

    walked: tuple[float, ...]
    """How often the target's token is the drafter's token of a rank, by probability."""
    raced: tuple[float, ...]
    """The same by the race with the noise of the place."""
    drawn: tuple[float, ...]
    """How often a child of a rank is accepted, of children drawn without replacement."""
    sharpness: float
    """The one of `SHARPNESSES` under which the target's tokens have the largest likelihood."""


def calibrate(setting: Setting, prompts: Sequence[list[int]], num_tokens: int) -> Calibration:
    """Lets the target write by itself, and compares the drafter's distributions with its tokens at each place."""
    plain = Arm("plain", "target_only" if setting.sampling.greedy else "coupled", TokenTree(()))
    ranks_walked, ranks_raced, drawn, likelihoods = [], [], [], []
    for seed, prompt in enumerate(prompts, 10_000):
        text = Text(setting, prompt, seed)
        for number in range(num_tokens):
            text.round(number, plain)
        text.close()
        written = torch.tensor(text.ids[len(prompt) :])
        laws = []
        for model in (setting.target, setting.drafter):
            sequence = model.cache.open(text.ids)
            model.cache.truncate(sequence, 0)
            logits = model.read([Reading(sequence, text.ids[:-1], num_tokens)])
            model.cache.close(sequence)
            is_draft = setting.sampling.greedy and model is setting.drafter
            laws.append(logits.float().softmax(dim=-1) if is_draft else probabilities(logits, setting.sampling))
        target, draft = laws
        scores = draft.double().log()
        ranks_walked.append(_ranks(scores, written))
        if setting.sampling.greedy:
            continue
        words = torch.tensor([DrawKey(derive_key(seed, Role.COUPLING), 0, 0).text_words]).expand(num_tokens, -1)
        times = exponentials(words, len(prompt) + torch.arange(num_tokens), draft.shape[1])
        ranks_raced.append(_ranks(scores - times.log(), written))
        chances = torch.stack([log_race_chances(scores, times, sharpness) for sharpness in SHARPNESSES])
        likelihoods.append(chances[:, torch.arange(num_tokens), written].clamp(min=-20.0).sum(dim=1))
        drawn.append(_accepted_of_drawn(setting, target, draft, seed))
    walked = _shares(torch.cat(ranks_walked))
    if setting.sampling.greedy:
        return Calibration(walked, walked, walked, 1.0)
    sharpness = SHARPNESSES[int(torch.stack(likelihoods).sum(dim=0).argmax())]
    return Calibration(walked, _shares(torch.cat(ranks_raced)), _means(torch.cat(drawn)), sharpness)


def _ranks(scores: Tensor, tokens: Tensor) -> Tensor:
    """Returns how many tokens have a higher score than the given ones, `[places]`."""
    return (scores > scores.gather(1, tokens.unsqueeze(1))).sum(dim=1)


def _shares(ranks: Tensor) -> tuple[float, ...]:
    """Returns how often each rank occurs, of all places."""
    return tuple((torch.bincount(ranks, minlength=RANKS)[:RANKS] / len(ranks)).tolist())


def _accepted_of_drawn(setting: Setting, target: Tensor, draft: Tensor, seed: int) -> Tensor:
    """Returns the chance that each of `RANKS` drawn children is accepted at each place, `[places, RANKS]`."""
    quantized = quantize(draft, setting.quantization)
    generator = torch.Generator().manual_seed(seed)
    count = len(target)
    tokens = quantized.draw_distinct(torch.rand(count, RANKS, generator=generator, dtype=torch.float64))
    rows = SparseRows(quantized.token_ids, quantized.weights.float() / TOTAL_WEIGHT, draft.shape[1])
    shapes = tuple(TokenTree((ROOT,) * int(own)) for own in (tokens >= 0).sum(dim=1))
    places = torch.arange(count).unsqueeze(1)
    of_places = places.expand(-1, RANKS + 1), places.expand(-1, RANKS)
    trees = TreeBatch(target, rows, tokens.clamp(min=0), shapes, *of_places)
    return WithoutReplacementRule().tree_law(trees).stop_probs[:, 1:]


def _means(chances: Tensor) -> tuple[float, ...]:
    return tuple(chances.mean(dim=0).tolist())


def arms_of(calibration: Calibration, is_greedy: bool) -> list[Arm]:
    """Returns what is compared, the baseline first: a chain of `BLOCK_LENGTH` under the default rule."""
    chain = TokenTree.chain(BLOCK_LENGTH)

    def planned(acceptance: tuple[float, ...], size: int) -> TokenTree:
        return shape_by_acceptance([acceptance] * DEPTH, size)

    if is_greedy:
        arms = [Arm("chain 8", "target_only", chain)]
        for size in SIZES:
            arms += [
                Arm(f"planned {size}", "target_only", planned(calibration.walked, size)),
                Arm(f"EAGLE-2 {size}", "target_only", plan=GrowthPlan.eagle2(size, DEPTH)),
                Arm(f"OPT-Tree {size}", "target_only", plan=opt_tree(size, DEPTH, 0.05)),
            ]
        return [*arms, Arm("SpecExec 64", "target_only", plan=spec_exec(64, DEPTH, 16, DEPTH))]
    arms = [Arm("block chain 8", "traversal", chain), Arm("coupled chain 8", "coupled", chain)]
    for size in SIZES:
        arms += [
            Arm(f"traversal planned {size}", "traversal", planned(calibration.drawn, size)),
            Arm(f"coupled planned {size}", "coupled", planned(calibration.raced, size)),
            Arm(
                f"coupled by racers {size}",
                "coupled",
                plan=GrowthPlan.eagle2(size, DEPTH),
                sharpness=calibration.sharpness,
            ),
        ]
    return [*arms, Arm("target_only EAGLE-2 32", "target_only", plan=GrowthPlan.eagle2(32, DEPTH))]


def measure_trees(
    setting: Setting,
    prompts: Sequence[list[int]],
    calibration: Calibration,
    num_tokens: int,
    wanted: Collection[str] = (),
) -> dict[str, Counts]:
    """Continues every prompt with every arm, or with the baseline and those that are wanted."""
    baseline, *others = arms_of(calibration, setting.sampling.greedy)
    arms = [baseline, *(arm for arm in others if not wanted or arm.name in wanted)]
    counts: dict[str, list[tuple[int, int, int]]] = {arm.name: [] for arm in arms}
    for seed, prompt in progress(list(enumerate(prompts)), f"trees, temperature {setting.sampling.temperature:g}"):
        for arm in arms:
            text = Text(setting, prompt, seed)
            accepted = rounds = drafted = 0
            while len(text.ids) < len(prompt) + num_tokens:
                own_accepted, own_drafted = text.round(rounds, arm)
                accepted, rounds, drafted = accepted + own_accepted, rounds + 1, drafted + own_drafted
            text.close()
            counts[arm.name].append((accepted, rounds, drafted))
    return {name: np.array(rows, dtype=np.float64) for name, rows in counts.items()}


def tree_counts(
    prompts: Sequence[str],
    calibration_prompts: Sequence[str],
    arguments: argparse.Namespace,
    target: CachedModel,
    drafter: CachedModel,
    quantization: Quantization,
    model_name: str,
) -> dict[float, dict[str, Counts]]:
    """Returns the counts of all arms at each temperature.

    Args:
        prompts: to continue.
        calibration_prompts: others.
        arguments: `max_tokens`, `temperatures` and `arms`.
        target: of the pair.
        drafter: of the pair.
        quantization: of the drafter.
        model_name: whose tokenizer is used.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    ids, others = ([tokenizer(prompt)["input_ids"] for prompt in own] for own in (prompts, calibration_prompts))
    found = {}
    with torch.inference_mode():
        for temperature in arguments.temperatures:
            setting = Setting(target, drafter, SamplingParams(temperature), quantization)
            calibration = calibrate(setting, others, arguments.max_tokens)
            found[temperature] = measure_trees(setting, ids, calibration, arguments.max_tokens, arguments.arms)
    return found
