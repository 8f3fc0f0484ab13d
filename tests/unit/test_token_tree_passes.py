"""In a token tree, the logits after a node are those of a pass over the text and the path to it, whatever else is read.

Trees are random; nodes are read in one step or in several, cut, kept and gone on from, beside texts without trees.
"""

import random
from dataclasses import dataclass, field

import pytest
import torch
from cached_subjects import SUBJECTS, Subject, assert_equal, make, random_ids, spoil
from tiny_models import FAMILY_SHAPE, FAMILY_WINDOW, family_network, read_in_place
from torch import Tensor

from draftwire.models import static_steps
from draftwire.models.kv_cache import BLOCK_SIZE, CachedSequence
from draftwire.models.lean_decoder import LeanDecoder
from draftwire.models.packing import positions_of
from draftwire.models.sequence_model import Reading, Segment
from draftwire.models.static_steps import StaticSteps, StepShape
from draftwire.models.torch_models import torch_model
from draftwire.options.layer_parallel.layer_parallel import LayerParallelDecoder
from tests.cache_integrity import check_integrity

torch.set_num_threads(1)

Parents = tuple[int, ...]


def random_parents(generator: random.Random, num_nodes: int, num_earlier: int = 0) -> Parents:
    """Returns the parents of more nodes of a tree; deep trees and wide ones are both likely."""
    near = generator.choice([1, 2, 100])
    nodes = range(num_earlier, num_earlier + num_nodes)
    return tuple(generator.randint(max(node - near, -1), node - 1) for node in nodes)


def path_to(node: int, parents: Parents) -> list[int]:
    """Returns the nodes from the root to a node."""
    return [] if node < 0 else [*path_to(parents[node], parents), node]


@dataclass
class Planted:
    """What a sequence has read: a text, and a tree after it."""

    sequence: CachedSequence
    text: list[int]
    nodes: list[int] = field(default_factory=list)
    parents: Parents = ()

    def grow(self, generator: random.Random) -> Reading:
        """Returns more to read, which is then noted."""
        text = [] if self.nodes else random_ids(generator, generator.randint(1, 5))
        num_nodes = generator.randint(1, 6) if self.nodes else generator.choice([0, 1, 3, 7, 12, 20])
        parents = random_parents(generator, num_nodes, len(self.nodes))
        ids = text + random_ids(generator, num_nodes)
        self.text += text
        self.nodes += ids[len(text) :]
        self.parents += parents
        return Reading(self.sequence, ids, generator.randint(0, len(ids)), parents)

    def rows(self, subject: Subject) -> Tensor:
        """Returns the logits after each token of the text and after each node, `[tokens, vocab]`, path by path."""
        rows = [row[-1] for row in subject.fresh(self.text).split(1)]
        inner = set(self.parents)
        paths = [path_to(node, self.parents) for node in range(len(self.nodes)) if node not in inner]
        found: dict[int, Tensor] = {}
        for depth in {len(path) for path in paths}:
            together = [path for path in paths if len(path) == depth]
            ids = torch.tensor([self.text + [self.nodes[node] for node in path] for path in together])
            with torch.inference_mode():
                logits = subject.reference(input_ids=ids, use_cache=False).logits
            for path, own in zip(together, logits, strict=True):
                found |= dict(zip(path, own[len(self.text) :], strict=True))
        return torch.stack(rows + [found[node] for node in range(len(self.nodes))])


def read(subject: Subject, generator: random.Random, planted: list[Planted]) -> None:
    """Lets sequences read more, in one call, and compares every logit."""
    readings = [one.grow(generator) for one in planted]
    spoil(subject.model)
    logits = subject.model.read(readings)
    check_integrity(subject.model.cache)
    for one, reading, rows in zip(planted, readings, logits.split([one.keep for one in readings]), strict=True):
        assert one.sequence.parents == one.parents
        expected = one.rows(subject)
        assert_equal(rows, expected[len(expected) - reading.keep :], subject.tolerance)


def settle(subject: Subject, generator: random.Random, one: Planted) -> None:
    """Keeps a path of a tree, cuts it, cuts the text, or leaves all as it is."""
    model, action = subject.model, generator.random()
    if action < 0.4:
        path = path_to(generator.randint(-1, len(one.nodes) - 1), one.parents)
        model.keep_path(one.sequence, path)
        one.text += [one.nodes[node] for node in path]
        one.nodes, one.parents = [], ()
        model.cache.publish(one.sequence, one.text)
    elif action < 0.6:
        count = generator.randint(0, len(one.nodes))
        model.cache.truncate(one.sequence, len(one.text) + count)
        one.nodes, one.parents = one.nodes[:count], one.parents[:count]
    elif action < 0.7:
        length = generator.randint(one.sequence.num_published * BLOCK_SIZE, len(one.text))
        model.cache.truncate(one.sequence, length)
        one.text, one.nodes, one.parents = one.text[:length], [], ()
    elif action < 0.8:  # what is known of the text is read by another sequence, and its tree is not
        model.cache.publish(one.sequence, one.text + random_ids(generator, len(one.nodes)))
        text = one.text + [one.nodes[node] for node in path_to(len(one.nodes) - 1, one.parents)]
        model.cache.close(one.sequence)
        one.sequence = model.cache.open([*text, 0])
        one.text, one.nodes, one.parents = text[: one.sequence.length], [], ()
    assert one.sequence.length == len(one.text) + len(one.nodes)


def with_subject(name: str, monkeypatch: pytest.MonkeyPatch) -> Subject:
    if name.endswith("in place"):
        read_in_place(monkeypatch)
    return make(name)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("name", SUBJECTS)
def test_logits_after_nodes_are_those_of_passes_path_by_path(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, generator = with_subject(name, monkeypatch), random.Random(seed)
    planted = []
    for length in (0, 3, 14, 40):
        sequence, text = subject.model.cache.open(), random_ids(generator, length)
        if text:
            subject.model.read([Reading(sequence, text, 0)])
        planted.append(Planted(sequence, text))
    for _ in range(5):
        read(subject, generator, generator.sample(planted, generator.randint(1, 4)))
        for one in planted:
            settle(subject, generator, one)


@pytest.mark.parametrize("name", ["mistral by the lean decoder in static shapes", "gemma2 by transformers"])
def test_tree_of_many_nodes_is_read_at_once(name: str) -> None:
    """Beside a small one and a text without any; in static shapes, where these are rounded up."""
    subject, generator = make(name), random.Random(7)
    planted = [Planted(subject.model.cache.open(), random_ids(generator, length)) for length in (30, 15, 9)]
    readings = []
    for one, num_nodes in zip(planted, (64, 5, 0), strict=True):
        one.nodes, one.parents = random_ids(generator, num_nodes), random_parents(generator, num_nodes)
        subject.model.read([Reading(one.sequence, one.text[:-1], 0)])
        readings.append(Reading(one.sequence, one.text[-1:] + one.nodes, num_nodes + 1, one.parents))
    logits = subject.model.read(readings)
    expected = [one.rows(subject)[len(one.text) - 1 :] for one in planted]
    assert_equal(logits, torch.cat(expected), subject.tolerance)


def test_steps_of_large_trees_are_static_and_others_are_as_before() -> None:
    subject = make("llama by the lean decoder in static shapes")
    steps = StaticSteps(subject.model._exact._decoder, subject.model._storage)

    def segment(num_tokens: int, num_nodes: int) -> Segment:
        parents = tuple(range(-1, num_nodes - 1))
        return Segment(CachedSequence(b"", [], 100, parents), num_tokens)

    assert [steps.fit([segment(count, 0)]) for count in (32, 33)] == [True, False]
    assert [steps.fit([segment(count, 64)]) for count in (65, static_steps.MOST_TREE_QUERIES + 1)] == [True, False]
    assert not steps.fit([segment(65, 64), segment(33, 0)])
    shapes = [StepShape.of([segment(*size), segment(1, 0)]) for size in ((33, 32), (65, 64), (9, 8), (4, 20), (4, 0))]
    assert shapes == [
        StepShape(2, 48, 256, 32),
        StepShape(2, 80, 256, 64),
        StepShape(2, 16, 256, 8),
        StepShape(2, 4, 256, 32),
        StepShape(2, 4, 256),
    ]


def test_positions_are_places_in_a_text_and_depths_in_a_tree() -> None:
    sequence = CachedSequence(b"", [], 9, (-1, 0, 0, 1, -1))
    assert positions_of(Segment(sequence, 7)) == [2, 3, 4, 5, 5, 6, 4]
    assert positions_of(Segment(sequence, 2)) == [6, 4]
    assert positions_of(Segment(CachedSequence(b"", [], 9), 3)) == [6, 7, 8]


def test_tree_across_blocks_is_shared_only_when_its_path_is_kept() -> None:
    """The path lies in other blocks than its nodes, and a text that begins likewise reads the path."""
    subject, generator = make("llama by the lean decoder"), random.Random(2)
    model = subject.model
    one = Planted(model.cache.open(), random_ids(generator, 45))
    model.read([Reading(one.sequence, one.text, 0)])
    one.nodes, one.parents = random_ids(generator, 60), (-1, -1, *range(1, 59))
    model.read([Reading(one.sequence, one.nodes, 0, one.parents)])
    path = path_to(59, one.parents)
    committed = one.text + [one.nodes[node] for node in path]
    model.cache.publish(one.sequence, committed)
    check_integrity(model.cache)
    early = model.cache.open(committed)
    assert early.num_reused == BLOCK_SIZE, "only what lies before the tree"
    model.keep_path(one.sequence, path)
    model.cache.publish(one.sequence, committed)
    late = model.cache.open([*committed, 1, 2])
    assert late.num_reused == 3 * BLOCK_SIZE
    spoil(model)
    rest = [*committed, 1, 2][late.length :]
    assert_equal(
        model.read([Reading(late, rest, len(rest))]), subject.fresh([*committed, 1, 2])[late.num_reused :], 1e-11
    )


def test_path_in_place_is_not_copied_and_one_that_cannot_be_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make("llama by the lean decoder")
    model, sequence = subject.model, subject.model.cache.open()

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    model.read([Reading(sequence, [1, 2, 3], 0)])
    with monkeypatch.context() as patch:
        patch.setattr(model, "_copy", fail)
        model.read([Reading(sequence, [4, 5, 6], 0, (-1, 0, 0))])
        model.keep_path(sequence, [0, 1])
        model.read([Reading(sequence, [7, 8], 0, (-1, -1))])
        with pytest.raises(RuntimeError, match="out of memory"):
            model.keep_path(sequence, [1])
    assert (sequence.length, sequence.parents) == (5, ())
    check_integrity(model.cache)
    assert_equal(model.read([Reading(sequence, [9], 1)]), subject.fresh([1, 2, 3, 4, 5, 9])[-1:], 1e-11)


def test_trees_that_grow_on_the_device_are_read_like_others() -> None:
    subject, generator = make("qwen2 by the lean decoder in static shapes"), random.Random(4)
    planted = [Planted(subject.model.cache.open(), random_ids(generator, length)) for length in (20, 3, 8)]
    for one in planted:
        subject.model.read([Reading(one.sequence, one.text, 0)])
    for width in (2, 4, 3):
        ids, parents = random_ids(generator, 2 * width + 1), []
        for one, own in zip(planted, (ids[:width], ids[width:-1]), strict=False):
            parents.append(random_parents(generator, width, len(one.nodes)))
            one.nodes += own
            one.parents += parents[-1]
        planted[2].text += ids[-1:]
        logits = subject.model.extend([one.sequence for one in planted], torch.tensor(ids), [*parents, ()])
        counts = (width, width, 1)
        expected = torch.cat([one.rows(subject)[-count:] for one, count in zip(planted, counts, strict=True)])
        assert_equal(logits, expected, subject.tolerance)


def test_layers_that_run_together_read_trees_as_they_read_texts() -> None:
    """They are approximate, so the passes to compare with are theirs."""
    shape = FAMILY_SHAPE | FAMILY_WINDOW | {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}
    decoder = LeanDecoder(family_network("qwen2", **shape))
    groups = ((0,), (1, 2, 3), (4,), (5,))
    generator = random.Random(5)
    text, nodes = [[generator.randrange(97) for _ in range(count)] for count in (30, 12)]
    parents = random_parents(generator, 12)

    def passed(ids: list[int], own: Parents) -> Tensor:
        model = torch_model(decoder, 400, drafting=LayerParallelDecoder(decoder, groups))
        return model.read([Reading(model.cache.open(), ids, len(ids), own)], fuzzily=True)

    rows = passed(text + nodes, parents)[len(text) :]
    for node, row in enumerate(rows):
        alone = passed(text + [nodes[each] for each in path_to(node, parents)], ())
        assert_equal(row, alone[-1], 1e-5)


@pytest.mark.parametrize("name", SUBJECTS)
def test_single_nodes_see_their_paths_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, as the last of a text would be read, which sees all before it; alone and beside another."""
    subject, generator = with_subject(name, monkeypatch), random.Random(6)
    one, other = (Planted(subject.model.cache.open(), random_ids(generator, length)) for length in (6, 7))
    for each in (one, other):
        subject.model.read([Reading(each.sequence, each.text, 0)])
    for members, parent in (([one], -1), ([one], -1), ([one], 0), ([one, other], -1), ([one, other], 0), ([one], 4)):
        for each in members:
            each.nodes += random_ids(generator, 1)
            each.parents += (parent,)
        logits = subject.model.read([Reading(each.sequence, each.nodes[-1:], 1, (parent,)) for each in members])
        assert_equal(logits, torch.stack([each.rows(subject)[-1] for each in members]), subject.tolerance)
