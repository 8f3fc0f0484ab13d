"""Training can be interrupted anywhere and gives the same result; the evaluation set stays out of it and is counted."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import save_tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from draftwire.training.batches import Repetition, TrainingBatch, TrainingTexts, batches, repeated, row_counts
from draftwire.training.plan import Phase, TrainingPlan
from draftwire.training.trainer import Trainer
from tools.embedded_pair.attention import attend_in_chunks
from tools.embedded_pair.conversations import CHAT_TEMPLATE, conversations
from tools.embedded_pair.corpus import (
    END_OF_TEXT,
    HELD_OUT_PERCENT,
    PACKAGES,
    SourceFile,
    encode_texts,
    packages,
    save_tokenizer,
    standard_library,
)
from tools.embedded_pair.evaluation import held_out_loss, measure_acceptance, share_repeated
from tools.embedded_pair.lessons import Lessons, sample_continuations
from tools.embedded_pair.pair import PairShape, inherit, mean_of
from tools.embedded_pair.pair_losses import distillation_loss
from tools.embedded_pair.recipe import LAST_STAGES, TARGET_STAGES, Stage

torch.set_num_threads(1)

VOCAB_SIZE = 11
PLAN = TrainingPlan(
    total_tokens=8 * 32,
    phases=(Phase(1.0, 8),),
    batch_tokens=32,
    micro_batch_tokens=16,
    warmup_fraction=0.25,
    seed=5,
)
TOKENS: NDArray[np.uint16] = np.random.default_rng(1).integers(0, VOCAB_SIZE, 100).astype(np.uint16)
"""12 windows: an epoch of three batches."""
SOURCES = [TrainingTexts(TOKENS, 1.0)]
TEXTS = partial(batches, SOURCES, PLAN)
SEPARATOR = 99


class InterruptError(Exception):
    """Stands for a power failure."""


def loss(model: PreTrainedModel, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def loss_that_fails_in_call(number: int) -> Callable[[PreTrainedModel, Tensor], Tensor]:
    calls = 0

    def failing(model: PreTrainedModel, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == number:
            raise InterruptError
        return loss(model, batch)

    return failing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), VOCAB_SIZE, 3)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("other"), VOCAB_SIZE, 4)


def load(folder: Path) -> PreTrainedModel:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def trained(folder: Path, state_path: Path) -> PreTrainedModel:
    """Trains to the end without an interruption."""
    model = load(folder)
    Trainer(model, PLAN, state_path, compiled=False).run(TEXTS, loss, "test")
    return model


@pytest.mark.parametrize(("layers", "expected"), [(1, [0]), (2, [0, 5]), (3, [0, 2, 5]), (6, [0, 1, 2, 3, 4, 5])])
def test_drafter_as_wide_as_the_target_begins_with_some_of_its_layers(layers: int, expected: list[int]) -> None:
    target, drafter = (PairShape(8, 16, depth, 2, 4).build(VOCAB_SIZE, seed=depth) for depth in (6, layers))
    torch.nn.init.normal_(target.model.norm.weight)
    inherit(drafter, target)
    for mine, source in zip(drafter.model.layers, expected, strict=True):
        assert_same_weights(mine, target.model.layers[source])
    for name in ("embed_tokens", "norm"):
        assert_same_weights(getattr(drafter.model, name), getattr(target.model, name))
    assert torch.equal(drafter.lm_head.weight, target.model.embed_tokens.weight)


@pytest.mark.parametrize("width", [6, 12])
def test_drafter_of_another_width_keeps_products_of_the_targets_embeddings(width: int) -> None:
    """As far as so many directions can tell."""
    target, drafter = (PairShape(each, 16, 2, 2, 4).build(VOCAB_SIZE, seed=each) for each in (8, width))
    own = drafter.model.embed_tokens.weight.detach().clone()
    inherit(drafter, target)
    theirs, mine = (each.model.embed_tokens.weight.detach() for each in (target, drafter))
    kept = min(width, 8)
    scales = torch.linalg.svdvals(theirs)
    lost = torch.linalg.matrix_norm(theirs @ theirs.T - mine[:, :kept] @ mine[:, :kept].T)
    assert float(lost) == pytest.approx(float(scales[kept:].pow(4).sum().sqrt()), abs=1e-6)
    assert torch.equal(mine[:, kept:], own[:, kept:])


def test_mean_of_models_has_the_mean_of_each_weight() -> None:
    models = [PairShape(8, 16, 2, 2, 4).build(VOCAB_SIZE, seed) for seed in (1, 2, 3)]
    before = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]
    for name, tensor in mean_of(models).state_dict().items():
        torch.testing.assert_close(tensor, torch.stack([state[name] for state in before]).mean(0))
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def assert_same_weights(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


REPETITION = Repetition(SEPARATOR, (0.0, 0.0, 0.02))
MIXED = [
    TrainingTexts(TOKENS, 0.5),
    TrainingTexts(TOKENS, 0.25, REPETITION),
    TrainingTexts(TOKENS[::-1].copy(), 0.25),
]
TWO_TEXTS = [MIXED[0], MIXED[2]]
IN_PHASES = replace(PLAN, phases=(Phase(0.5, 4), Phase(0.5, 8)))


def ids_of(found: Iterator[TrainingBatch]) -> list[Tensor]:
    return [ids for (ids,) in found]


@pytest.mark.parametrize(("sources", "plan"), [(SOURCES, PLAN), (MIXED, PLAN), (MIXED, IN_PHASES)])
@pytest.mark.parametrize("first_step", range(9))
def test_batches_resumed_at_any_step_are_those_of_an_uninterrupted_run(
    first_step: int, sources: list[TrainingTexts], plan: TrainingPlan
) -> None:
    whole, resumed = ids_of(batches(sources, plan)), ids_of(batches(sources, plan, first_step))
    assert len(whole) == plan.steps == 8
    assert len(resumed) == 8 - first_step
    assert all(torch.equal(a, b) for a, b in zip(resumed, whole[first_step:], strict=True))


def test_every_epoch_and_seed_reads_every_window_once_in_another_order() -> None:
    """With a target for the last token of each."""
    whole = [tuple(TOKENS[start : start + 9].tolist()) for start in range(0, 96, 8)]
    orders = []
    for plan in (PLAN, replace(PLAN, seed=6)):
        rows = torch.cat(ids_of(batches(SOURCES, plan))[:6])
        assert rows.dtype == torch.int64
        orders += [[tuple(row) for row in part.tolist()] for part in rows.split(12)]
    assert all(sorted(order) == sorted(whole) for order in orders)
    assert all(order != other for order, other in combinations(orders, 2))


def test_phases_have_windows_of_their_length_and_batches_of_as_many_tokens() -> None:
    shapes = [tuple(ids.shape) for ids in ids_of(batches(MIXED, IN_PHASES))]
    assert shapes == [(8, 5)] * 4 + [(4, 9)] * 4


@pytest.mark.parametrize("shares", [(0.5, 0.4), (1.0, 0.1), (0.0, 1.0), ()])
def test_phases_that_are_not_the_whole_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="share"):
        replace(PLAN, phases=tuple(Phase(share, 8) for share in shares))


def test_tokens_that_do_not_fill_a_batch_are_refused() -> None:
    list(batches([TrainingTexts(TOKENS[:33], 1.0)], PLAN))
    with pytest.raises(ValueError, match="do not fill"):
        list(batches([TrainingTexts(TOKENS[:32], 1.0)], PLAN))


@pytest.mark.parametrize(
    ("shares", "rows", "expected"),
    [
        ((0.68, 0.14, 0.10, 0.08), 32, [22, 4, 3, 3]),
        ((0.68, 0.14, 0.10, 0.08), 8, [5, 1, 1, 1]),
        ((0.30, 0.54, 0.06, 0.10), 16, [5, 9, 1, 1]),
        ((0.30, 0.54, 0.06, 0.10), 8, [2, 4, 1, 1]),
        ((1.0,), 5, [5]),
        ((3.0, 1.0), 4, [3, 1]),
    ],
)
def test_rows_of_a_batch_are_dealt_out_by_share(shares: tuple[float, ...], rows: int, expected: list[int]) -> None:
    assert row_counts(shares, rows) == expected


def test_passage_comes_a_second_time_after_the_separator_and_then_goes_on() -> None:
    ids = np.arange(2000, dtype=np.uint16)
    edited = 0
    for seed in range(60):
        window = repeated(ids, 100, 64, REPETITION, np.random.default_rng(seed))
        assert len(window) == 65
        size = window.tolist().index(SEPARATOR)  # what it stands for comes before the passage only
        assert 16 <= size < 32
        assert window[:size].tolist() == list(range(100, 100 + size))
        copy, rest = window[size + 1 :].tolist(), list(range(100, 164))
        edited += copy != rest[: len(copy)]
        assert len(set(copy) & set(rest)) >= 0.6 * len(copy)
    assert 0.1 < edited / 60 < 0.6


@pytest.mark.parametrize("copies", [1, 2, 7])
def test_passage_is_repeated_as_often_as_it_fits_and_is_wanted(copies: int) -> None:
    ids = np.arange(2000, dtype=np.uint16)
    how, found = Repetition(SEPARATOR, (0.0,), shortest=0.125, copies=copies), set()
    for seed in range(300):
        window = repeated(ids, 100, 64, how, np.random.default_rng(seed)).tolist()
        size = window.index(SEPARATOR)
        assert 8 <= size < 32
        passage, number = list(range(100, 100 + size)), min(copies, 64 // size - 1)
        expected = passage + [SEPARATOR, *passage] * number + list(range(100 + size, 200))
        assert window == expected[:65]
        found.add(number)
    assert found == set(range(1, copies + 1))


def test_random_passages_use_few_tokens_and_repeat_before_the_text_goes_on() -> None:
    ids, numbers = np.arange(2000, dtype=np.uint16), []
    how = Repetition(1999, (0.0,), shortest=0.25, copies=1, alphabet=(3, 9))
    for seed in range(100):
        window = repeated(ids, 100, 200, how, np.random.default_rng(seed)).tolist()
        size = window.index(1999)
        passage, numbers = window[:size], [*numbers, len(set(window[:size]))]
        assert set(passage) < set(range(100, 100 + size))
        assert window == ([*passage, 1999, *passage, *range(100 + size, 400)])[:201]
    assert (min(numbers), max(numbers)) == (2, 9)  # with two of the same token at times


@pytest.mark.parametrize("stage", [*TARGET_STAGES, *LAST_STAGES], ids=lambda stage: stage.name)
def test_shares_of_what_is_read_are_those_that_the_recipe_names(stage: Stage, tmp_path: Path) -> None:
    kinds = ("library", "packages", "conversations")
    for number, name in enumerate(kinds):
        np.save(tmp_path / f"{name}.npy", np.full(9, number, dtype=np.uint16))
    sources, mix = stage.mix.sources(tmp_path), stage.mix
    found = [(kinds[source.ids[0]], source.share, source.repetition) for source in sources]
    copies = [("library", share, how) for how, share in mix.copies.items()]
    read = [
        ("library", mix.library, None),
        ("packages", mix.packages, None),
        ("conversations", mix.conversations, None),
    ]
    assert found == [read[0], *copies, *read[1:]]
    assert sum(source.share for source in sources) == pytest.approx(1.0)


def test_shortened_plan_has_as_much_less_of_each_phase() -> None:
    shortened = IN_PHASES.shortened(0.5)
    assert (shortened.steps, shortened.phase_ends) == (4, [2, 4])
    assert replace(shortened, total_tokens=IN_PHASES.total_tokens) == IN_PHASES


@pytest.mark.parametrize("copies", [1, 7])
def test_window_at_the_end_of_the_texts_is_as_long_as_any(copies: int) -> None:
    ids, how = np.arange(66, dtype=np.uint16), replace(REPETITION, copies=copies)
    assert {len(repeated(ids, 1, 64, how, np.random.default_rng(seed))) for seed in range(200)} == {65}


@pytest.mark.parametrize("length", [5, 128, 200, 256])
def test_attention_in_chunks_is_causal_attention(length: int) -> None:
    """In bfloat16, so that its results are not quite those of float32."""
    model = PairShape(hidden_size=16, intermediate_size=32, layers=2, heads=2, head_dim=8).build(VOCAB_SIZE, seed=1)
    ids = torch.randint(0, VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids).logits
    attend_in_chunks(model)
    found = model(input_ids=ids).logits
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=0)
    assert not torch.equal(found, expected)
    begun = model(input_ids=ids[:, :-3], use_cache=True)
    ended = model(input_ids=ids[:, -3:], past_key_values=begun.past_key_values)
    torch.testing.assert_close(torch.cat([begun.logits, ended.logits], 1), expected, atol=5e-3, rtol=0)


def test_learning_rate_rises_stays_and_falls_within_its_bounds() -> None:
    plan = TrainingPlan(
        total_tokens=1000,
        phases=(Phase(1.0, 1),),
        micro_batch_tokens=1,
        batch_tokens=1,
        warmup_fraction=0.1,
        decay_fraction=0.5,
    )
    rates = [plan.rate(step) for step in range(plan.steps)]
    assert all(0.0 < rate <= 1.0 for rate in rates)
    assert all(after > before for before, after in pairwise(rates[:99]))
    assert set(rates[100:500]) == {1.0}
    assert all(after < before for before, after in pairwise(rates[501:]))
    assert rates[-1] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("failing_call", [2, 3, 7, 12, 16])
def test_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    failing_call: int, folder: Path, other_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(folder, tmp_path / "whole.pt")
    monkeypatch.setattr(Trainer, "CHECKPOINT_SECONDS", -1.0)  # after every step
    state_path = tmp_path / "interrupted.pt"
    with pytest.raises(InterruptError):
        # A step takes two calls, so that an even call is in the middle of one.
        Trainer(load(folder), PLAN, state_path, compiled=False).run(
            TEXTS, loss_that_fails_in_call(failing_call), "test"
        )
    has_checkpoint = failing_call > 2
    assert state_path.exists() == has_checkpoint
    model = load(other_folder if has_checkpoint else folder)  # whatever the weights are, the checkpoint's count
    trainer = Trainer(model, PLAN, state_path, compiled=False)
    assert trainer.step == (failing_call - 1) // 2
    trainer.run(TEXTS, loss, "test")
    assert trainer.step == PLAN.steps
    assert_same_weights(model, expected)


def test_run_changes_every_weight_matrix(folder: Path, tmp_path: Path) -> None:
    before, after = load(folder).state_dict(), trained(folder, tmp_path / "state.pt").state_dict()
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_parts_of_a_batch_weigh_as_their_windows(folder: Path, tmp_path: Path) -> None:
    """Three windows and one change the weights as the four together do."""
    steps = []
    for micro_batch_tokens in (32, 24):
        model, before = load(folder), load(folder).state_dict()
        plan = replace(PLAN, total_tokens=32, micro_batch_tokens=micro_batch_tokens)
        Trainer(model, plan, tmp_path / f"{micro_batch_tokens}.pt", False).run(
            partial(batches, SOURCES, plan), loss, "test"
        )
        steps.append(torch.cat([(after - before[name]).flatten() for name, after in model.state_dict().items()]))
    whole, parts = steps
    assert (parts - whole).norm() < 0.01 * whole.norm()


def test_finished_run_is_not_trained_further(folder: Path, other_folder: Path, tmp_path: Path) -> None:
    expected = trained(folder, tmp_path / "state.pt")
    model = load(other_folder)
    Trainer(model, PLAN, tmp_path / "state.pt", compiled=False).run(TEXTS, loss_that_fails_in_call(1), "test")
    assert_same_weights(model, expected)


@pytest.mark.parametrize(
    "change", [{"seed": 6}, {"total_tokens": 9 * 32}, {"matrix_learning_rate": 0.021}, {"micro_batch_tokens": 32}]
)
def test_checkpoint_of_another_plan_is_refused(change: dict[str, float], folder: Path, tmp_path: Path) -> None:
    trained(folder, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="another plan"):
        Trainer(load(folder), replace(PLAN, **change), tmp_path / "state.pt", compiled=False)


@pytest.mark.parametrize(
    ("path", "held_out"),
    [
        ("abc.py", True),
        ("email/_policybase.py", True),
        ("importlib/metadata/_functools.py", True),
        ("asyncio/events.py", False),
        ("email/policy.py", False),
        ("typing.py", False),
    ],
)
def test_held_out_depends_on_the_path_alone(path: str, held_out: bool) -> None:
    for text in ("", "x = 1\n", "anything else"):
        assert SourceFile(path, text).held_out is held_out


def test_share_of_files_is_held_out() -> None:
    share = sum(SourceFile(f"package/module_{index}.py", "").held_out for index in range(10_000)) / 10_000
    assert share == pytest.approx(HELD_OUT_PERCENT / 100, abs=0.005)


def test_corpus_is_sorted_usable_source_without_installed_packages(tmp_path: Path) -> None:
    files = {
        "b.py": b"b = 1\n",
        "a/c.py": b"c = 1\n",
        "empty.py": b" \n",
        "latin.py": b"# \xe9\n",
        "huge.py": b"#" * 400_001,
        "site-packages/installed.py": b"x = 1\n",
        "notes.txt": b"text",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert list(standard_library(tmp_path)) == [SourceFile("a/c.py", "c = 1\n"), SourceFile("b.py", "b = 1\n")]


def test_packages_are_installed_sources_with_licences_to_redistribute() -> None:
    for name, licence in PACKAGES.items():
        assert {"MIT", "Apache-2.0", "BSD-3-Clause", "BSD-2-Clause"} & set(licence.split()), name
    files = list(packages(["packaging"]))
    assert "packaging/version.py" in [file.path for file in files]
    assert all(file.text.strip() and file.path.endswith(".py") for file in files)


SOURCE = '''
class Box:
    def put(self, item, twice=False):
        """Put an item
        into the box.

        Whatever it is.
        """
        self.items.append(item)

def test_put():
    """Not part of the library."""

def bare():
    pass
'''


def test_conversations_ask_for_documented_functions_by_the_template(tmp_path: Path) -> None:
    made = list(conversations([SourceFile("a/box.py", SOURCE), SourceFile("broken.py", "def f(:\n")]))
    code = "```python\n" + inspect.cleandoc(SOURCE.split("class Box:")[1].split("def test_put")[0]) + "\n```"
    summary = "Put an item into the box."
    expected = [
        [
            ("What does `put` in `a.box` do?", summary),
            ("What does `put` take?", "`put` takes `item` and `twice`."),
        ],
        [(f"Write a function `put`: {summary}", code)],
        [("Show me `put` of `a.box`.", code), ("What does it do?", summary)],
    ]
    tokenizer = Tokenizer(models.WordLevel({END_OF_TEXT: 0}, unk_token=END_OF_TEXT))
    save_tokenizer(tokenizer, tmp_path, 8, CHAT_TEMPLATE)
    reader = AutoTokenizer.from_pretrained(tmp_path)
    for text, turns in zip(made, expected, strict=True):
        messages = []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        assert reader.apply_chat_template(messages, tokenize=False) == f"{END_OF_TEXT}{text}\n"
        asked = reader.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert f"{END_OF_TEXT}{text}".startswith(asked)
        assert asked.endswith("Assistant:\n")


def test_every_encoded_text_starts_with_end_of_text() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ids = encode_texts(tokenizer, ["a b", "b"], end_of_text=0)
    assert ids.dtype == np.uint16
    assert ids.tolist() == [0, 1, 2, 0, 2]


@pytest.fixture(scope="module")
def lessons(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Lessons:
    written = Lessons(IN_PHASES, tmp_path_factory.mktemp("lessons"))
    written.write(load(folder), TWO_TEXTS, compiled=False)
    return written


def test_lessons_are_what_the_target_says_about_the_texts(lessons: Lessons, folder: Path) -> None:
    """In bfloat16, as training computes."""
    found = list(lessons.batches(IN_PHASES))
    texts = ids_of(batches(TWO_TEXTS, IN_PHASES))
    for phase in (slice(0, 4), slice(4, 8)):
        read = {tuple(ids.flatten().tolist()) for ids, _ in found[phase]}
        assert read == {tuple(ids.flatten().tolist()) for ids in texts[phase]}
    target = load(folder)
    for ids, states in found:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected = target.model(ids[:, :-1]).last_hidden_state
        torch.testing.assert_close(states, expected, atol=1e-3, rtol=1e-3, check_dtype=False)


@pytest.mark.parametrize("first_step", [0, 1, 4, 11, 12, 13, 23])
def test_lessons_resumed_at_any_step_are_those_of_an_uninterrupted_run(first_step: int, lessons: Lessons) -> None:
    plan = IN_PHASES.shortened(3)
    whole, resumed = list(lessons.batches(plan)), list(lessons.batches(plan, first_step))
    assert len(whole) == plan.steps == 24
    assert len(resumed) == 24 - first_step
    for batch, expected in zip(resumed, whole[first_step:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, expected, strict=True))


def test_every_epoch_reads_every_lesson_once_in_another_order(lessons: Lessons) -> None:
    read = [ids.flatten().tolist() for ids, _ in lessons.batches(IN_PHASES.shortened(3))]
    for phase in (read[:12], read[12:]):
        epochs = [phase[start : start + 4] for start in (0, 4, 8)]
        assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_distillation_is_cross_entropy_plus_twice_the_refusal_chance(folder: Path, other_folder: Path) -> None:
    target, drafter = (load(each).requires_grad_(False) for each in (folder, other_folder))
    ids = torch.from_numpy(TOKENS[:18].astype(np.int64)).view(2, 9)
    found = distillation_loss(target)(drafter, ids, target.model(ids[:, :-1]).last_hidden_state)
    p, q = (each(ids[:, :-1]).logits.softmax(-1) for each in (target, drafter))
    refused = 1.0 - torch.minimum(p, q).sum(-1)
    assert float(found) == pytest.approx(float((-(p * q.log()).sum(-1) + 2.0 * refused).mean()), abs=0.02)


def test_continuations_are_drawn_from_the_target(folder: Path) -> None:
    """At a temperature near zero, where only its likeliest tokens are drawn."""
    target, prompts = load(folder), TOKENS[:12].reshape(3, 4)
    found = sample_continuations(target, prompts, 6, 1e-6, torch.Generator().manual_seed(1))
    ids = torch.from_numpy(prompts.astype(np.int64))
    for _ in range(6):
        ids = torch.cat([ids, target(ids).logits[:, -1:].argmax(-1)], 1)
    assert found.tolist() == ids.tolist()


def test_held_out_loss_is_the_mean_over_whole_windows(folder: Path) -> None:
    model = load(folder)
    expected = torch.stack([loss(model, torch.from_numpy(TOKENS[i : i + 9].astype(np.int64))[None]) for i in (0, 8)])
    assert held_out_loss(model, TOKENS[:24], sequence_length=8) == pytest.approx(expected.mean().item(), abs=1e-5)


class Copyist:
    """A model that goes on as the text did when it stood there first, but for the tokens at some places."""

    def __init__(self, separator: int, mistakes: set[int]) -> None:
        self._separator, self._mistakes = separator, mistakes

    def generate(self, prompt: Tensor, *, max_new_tokens: int, **_: object) -> Tensor:
        ids = prompt[0].tolist()
        middle = ids.index(self._separator)
        lead = len(ids) - middle - 1
        assert ids[:lead] == ids[middle + 1 :]
        written = ids[lead : lead + max_new_tokens]
        return torch.tensor([[*ids, *(0 if n in self._mistakes else each for n, each in enumerate(written))]])


@pytest.mark.parametrize(("mistakes", "expected"), [(set(), 1.0), ({0}, 0.8), ({1, 4}, 0.6)])
def test_share_repeated_counts_tokens_of_the_copy_in_their_places(mistakes: set[int], expected: float) -> None:
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 1, 2, 3, 4]]
    copyist = cast(LlamaForCausalLM, Copyist(SEPARATOR, mistakes))
    assert share_repeated(copyist, texts, SEPARATOR, lead=3, length=5) == expected


@pytest.mark.parametrize("rule", ["block", "token"])
def test_model_that_drafts_for_itself_is_accepted_but_for_its_cut_tail(rule: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, VOCAB_SIZE, 3, context_length=256)
    for temperature in (0.0, 1.0):
        measured = measure_acceptance(load(path), load(path), [[1, 2], [3]], rule, temperature, block_length=3)
        assert (measured.rule, measured.temperature, measured.block_length) == (rule, temperature, 3)
        if temperature == 0.0:
            # Equal models differ by the rounding of float32 at most, once in a million tokens.
            assert measured.acceptance_rate == 1.0
            assert measured.block_efficiency == 4.0
            assert measured.by_position == [1.0] * 3
        else:
            # The drafter keeps 98 % of the mass, so each token is kept with a probability of 0.98 at least.
            assert measured.acceptance_rate > 0.95
            assert measured.block_efficiency > 3.8


@pytest.mark.slow
def test_acceptance_counts_accepted_over_drafted_and_tokens_over_rounds(tmp_path: Path) -> None:
    folders = [save_tiny_model(tmp_path / str(seed), VOCAB_SIZE, seed, context_length=256) for seed in (3, 4)]
    models = [load(path) for path in folders]
    for _ in range(2):  # a pair may be measured again
        measured = measure_acceptance(models[0], models[1], [[1, 2], [3]], "block", 1.0, block_length=1)
        assert 0.0 < measured.acceptance_rate < 1.0
        assert measured.by_position == [measured.acceptance_rate]
        # A block of one gives a token, and one more if it is accepted; only the last block of a text may be empty.
        assert measured.block_efficiency == pytest.approx(1.0 + measured.acceptance_rate, abs=0.02)
