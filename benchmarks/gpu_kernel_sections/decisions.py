"""What a verifier does from its logits to its answer, part by part: law, rule and audit of chains and trees."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kernel_sections.inferred import (
    AUDIT_OPERATIONS,
    OPERATION_US,
    RULE_OPERATIONS,
    TREE_AUDIT_OPERATIONS,
    TREE_MS,
    TREE_OPERATIONS,
)
from benchmarks.gpu_kernel_sections.recording import num_operations
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from benchmarks.gpu_sections.timer import Timer
from benchmarks.rules import Shape, Step
from draftwire.audit import audit_sums
from draftwire.method.distributions import SparseRows
from draftwire.method.sampling import Span, is_distribution, probabilities_of_spans
from draftwire.options.trees.token_tree import TokenTree
from draftwire.options.trees.tree_choice import TRAVERSAL
from draftwire.options.trees.tree_rule import verify_trees
from draftwire.options.trees.tree_shapes import CHANCES, shape_by_rank
from draftwire.options.trees.trees import TreeBatch
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES, BlockBatch, KeyedNoise, verify
from draftwire.verification.rule import Outcome

BLOCKS = ((1, 4), (16, 8), (64, 8), (1, 8), (16, 4))
"""Texts, and the draft tokens of each: 5, 144, 576, 9 and 80 rows of logits."""
TINY_BLOCKS = ((1, 4), (4, 8))
STUDIED = (1, 4)
SUPPORT = 64
RULE_NAMES = ("block", "token", "coupled")
LAWS = {
    "T = 1": SamplingParams(),
    "T = 0": SamplingParams(0.0),
    "top-p 0.95": SamplingParams(0.7, top_p=0.95),
    "top-k 50": SamplingParams(0.7, top_k=50),
}
TREES = ((14, 4), (16, 4), (60, 8))
"""Nodes, and draft tokens on a path."""
POSITION = 100
"""Of the blocks in their texts."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the steps from logits to an answer."""

    name: str
    work: Callable[[], object]
    prepare: Callable[[], object]
    """What comes before it, and is not timed."""


class Chains:
    """Blocks of some texts, as far as they are decided."""

    def __init__(self, step: Step) -> None:
        """Starts with the logits."""
        self._step = step
        self._probs: Tensor | None = None
        self._blocks: BlockBatch | None = None
        self._outcome: Outcome | None = None

    def parts(self) -> list[Part]:
        """Returns all parts in their order."""
        laws = [Part(f"law, {name}", partial(self._take_law, params), self.restore) for name, params in LAWS.items()]
        rules = [Part(f"rule {name}", partial(self._decide, name), self._pack) for name in RULE_NAMES]
        return [
            *laws,
            Part("check of the rows, with its wait", self._check, self._start),
            Part("upload of drafts", self._pack, self._start),
            *rules,
            Part("download of the decision", self._download, self._decide_block),
            Part("audit", self._audit, self._decide_block),
        ]

    def decide_all(self) -> None:
        """Runs all that comes before the answer, as a verifier does: the law at temperature 1, and the rule `block`."""
        self._take_law(LAWS["T = 1"])
        self._check()
        self._decide_block()
        self._download()

    def restore(self) -> None:
        """Brings the logits back, which a law overwrites."""
        self._step.buffer.copy_(self._step.logits)

    def _start(self) -> None:
        self.restore()
        self._take_law(LAWS["T = 1"])

    def _take_law(self, params: SamplingParams) -> None:
        spans = [Span(params, self._step.length + 1)] * self._step.batch_size
        self._probs = probabilities_of_spans(self._step.buffer, spans)

    def _check(self) -> None:
        is_distribution(self._given_probs).tolist()

    def _pack(self) -> None:
        step = self._step
        starts = [index * (step.length + 1) for index in range(step.batch_size)]
        self._blocks = BlockBatch.packed(self._given_probs, step.drafts, step.tokens, starts)

    def _decide(self, rule: str) -> None:
        assert self._blocks is not None, "they are packed before"
        noise = KeyedNoise(self._step.keys, [POSITION] * self._step.batch_size, self._step.device)
        self._outcome = verify(RULES[rule], self._blocks, noise)

    def _decide_block(self) -> None:
        self._pack()
        self._decide("block")

    def _download(self) -> None:
        assert self._outcome is not None, "they are decided before"
        torch.stack([self._outcome.num_accepted, self._outcome.extra_tokens]).tolist()

    def _audit(self) -> None:
        assert self._blocks is not None, "they are packed before"
        audit_sums(self._blocks)

    @property
    def _given_probs(self) -> Tensor:
        assert self._probs is not None, "the law is taken before"
        return self._probs


class DrawnTree:
    """A token tree whose distributions were sent, and the target's distributions after its nodes."""

    def __init__(self, step: Step, shape: TokenTree) -> None:
        """Gives the children of each node the likeliest tokens of what a drafter may say there."""
        params = SamplingParams()
        rows = step.logits[: len(shape) + 1].clone()
        self._probs = probabilities_of_spans(rows, [Span(params, len(rows))])
        noisy = self._probs.log() + 0.5 * torch.randn(self._probs.shape, device=step.device)
        best = noisy[[node + 1 for node in shape.inner_nodes]].topk(min(SUPPORT, rows.shape[1]))
        ids, probs = best.indices.cpu(), best.values.softmax(-1).cpu()
        self._rows = SparseRows(ids, probs, rows.shape[1])
        self._tokens = [0] * len(shape)
        for place, node in enumerate(shape.inner_nodes):
            for child, token in zip(shape.children(node), ids[place].tolist(), strict=False):
                self._tokens[child] = token
        self._shape, self._keys, self._device = shape, step.keys[:1], step.device
        self._trees: TreeBatch | None = None

    def pack(self) -> None:
        """Uploads the tree."""
        self._trees = TreeBatch.packed(self._probs, [self._rows], [self._tokens], [self._shape], [0])

    def decide(self) -> None:
        """Decides about the tree as the rule `block` does."""
        assert self._trees is not None, "it is packed before"
        outcome = verify_trees(TRAVERSAL, self._trees, KeyedNoise(self._keys, [POSITION], self._device))
        torch.stack([outcome.last_nodes, outcome.extra_tokens]).tolist()

    def audit(self) -> None:
        """Audits its tokens."""
        assert self._trees is not None, "it is packed before"
        audit_sums(self._trees.drawn_one_by_one(0))


@torch.inference_mode()
def decisions(plan: Plan, findings: Findings, budget: Budget) -> None:
    """Runs the section."""
    timer = Timer(plan.device)
    findings.results["chains"] = found = {}
    for texts, length in TINY_BLOCKS if plan.is_tiny else BLOCKS:
        if budget.is_nearly_spent:
            findings.lacks(f"{texts} blocks of {length}", "the section's time was spent")
            continue
        shape = Shape(plan.shape.vocab_size, length, SUPPORT)
        step = Step(shape, texts, str(plan.device), made_on=str(plan.device))
        name = f"{texts} block{'s' if texts > 1 else ''} of {length}"
        found[name] = parts = times_of(Chains(step), plan, timer)
        findings.rows += [Row(f"{name}: {part}", own["ms"], "ms") for part, own in parts.items()]
        if (texts, length) == STUDIED:
            findings.rows += _rows_of_operations(parts)
    step = Step(Shape(plan.shape.vocab_size, TREES[-1][0], SUPPORT), 1, str(plan.device), made_on=str(plan.device))
    findings.results["trees"] = trees = {}
    for num_nodes, depth in TREES:
        if budget.is_nearly_spent:
            findings.lacks(f"tree of {num_nodes}", "the section's time was spent")
            continue
        trees[num_nodes] = own = tree_times(DrawnTree(step, shape_by_rank(CHANCES, num_nodes, depth)), plan, timer)
        label, is_last = f"tree of {num_nodes} in {depth}", num_nodes == TREES[-1][0]
        audit = TREE_AUDIT_OPERATIONS if is_last else None
        findings.rows += [
            Row(f"{label}: rule, with its download", own["rule_ms"], "ms", inferred=TREE_MS if is_last else None),
            Row("  operations", own["rule_operations"], inferred=TREE_OPERATIONS.get(num_nodes)),
            Row(f"{label}: audit", own["audit_ms"], "ms"),
            Row("  operations", own["audit_operations"], inferred=audit),
        ]


def times_of(chains: Chains, plan: Plan, timer: Timer) -> dict[str, dict[str, Any]]:
    """Returns the time of each part from an idle device until it is idle again, and the operations that it launches."""
    chains.restore()
    chains.decide_all()  # so that each part has what comes before it
    found: dict[str, dict[str, Any]] = {}
    whole = Part("all before the answer, T = 1, block", chains.decide_all, chains.restore)
    for part in (*chains.parts(), whole):
        milliseconds = timer.median_ms(part.work, plan.repetitions, part.prepare)
        part.prepare()
        found[part.name] = {"ms": milliseconds, "operations": num_operations(part.work)}
    return found


def _rows_of_operations(parts: dict[str, dict[str, Any]]) -> list[Row]:
    *_, whole = parts.values()
    audit = parts["audit"]
    return [
        Row("  operations before the answer", whole["operations"], inferred=RULE_OPERATIONS),
        Row("  operations of the audit", audit["operations"], inferred=AUDIT_OPERATIONS),
        Row("  each, before the answer", whole["ms"] / whole["operations"] * 1e3, "us", inferred=OPERATION_US),
        Row("  each, of the audit", audit["ms"] / audit["operations"] * 1e3, "us", inferred=OPERATION_US),
    ]


def tree_times(tree: DrawnTree, plan: Plan, timer: Timer) -> dict[str, Any]:
    """Returns times and operations of the rule and of the audit of a tree."""
    tree.pack()
    found: dict[str, Any] = {}
    for name, work in (("rule", tree.decide), ("audit", tree.audit)):
        found[f"{name}_ms"] = timer.median_ms(work, min(10, plan.repetitions), tree.pack)
        tree.pack()
        found[f"{name}_operations"] = num_operations(work)
    return found
