"""Stores of files' tokens, against a search through all of them."""

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import save_tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers

from draftwire.errors import InvalidRequestError
from draftwire.models.card import load_card
from draftwire.models.description import fingerprint
from draftwire.options.model_free import store_building
from draftwire.options.model_free.retrieval import RetrievalText
from draftwire.options.model_free.retrieval_store import DEPTH, MAX_MATCH, MAX_SAMPLED, RetrievalStore, StoreMatch
from draftwire.options.model_free.store_building import build_store, check_files, read_tokens, sort_suffixes
from draftwire.options.model_free.text_drafter import NOTHING, Guess

FINGERPRINT = fingerprint(["a", "b", "c"])
DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=25), min_size=1, max_size=5).filter(any)
CONTEXTS = st.lists(st.integers(0, 2), max_size=24)


def build(
    folder: Path, documents: Sequence[Sequence[int]], vocab_size: int = 3, replace: bool = False
) -> RetrievalStore:
    arrays = [np.array([*document, vocab_size]) for document in documents]
    build_store(folder, arrays, FINGERPRINT, vocab_size, replace=replace)
    return RetrievalStore.open(folder, FINGERPRINT)


def stored(folder: Path) -> tuple[list[int], list[int]]:
    """Returns the tokens and the suffix array of a store."""
    index = json.loads((folder / "index.json").read_text())
    tokens = np.fromfile(folder / "tokens.bin", index["token_dtype"])
    return tokens.tolist(), np.fromfile(folder / "suffixes.bin", index["suffix_dtype"]).tolist()


def longest_match(tokens: list[int], context: list[int]) -> int:
    """Returns the length of the longest suffix of a context, up to `MAX_MATCH`, that tokens have."""
    lengths = range(min(MAX_MATCH, len(context)), 0, -1)
    return next((length for length in lengths if places_of(tokens, context[-length:])), 0)


def places_of(tokens: list[int], sought: list[int]) -> list[int]:
    return [place for place in range(len(tokens)) if tokens[place : place + len(sought)] == sought]


def likeliest(followings: list[list[int]], num_tokens: int, separator: int) -> list[int]:
    """Returns the path of the most frequent tokens, of equally frequent ones the lowest."""
    path: list[int] = []
    while len(path) < num_tokens:
        counts = Counter(following[len(path)] for following in followings if following[: len(path)] == path)
        token = min(counts, key=lambda each: (-counts[each], each))
        if token == separator:
            break
        path.append(token)
    return path


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=150),
    repeats=st.integers(1, 4),
    sorted_together=st.integers(1, 40),
)
def test_suffixes_are_in_the_order_of_what_follows(tokens: list[int], repeats: int, sorted_together: int) -> None:
    text = tokens * repeats
    suffixes = sort_suffixes(np.array(text, np.uint16), 3, sorted_together).tolist()
    assert sorted(suffixes) == list(range(len(text)))
    assert all(text[one : one + DEPTH] <= text[other : other + DEPTH] for one, other in pairwise(suffixes))


def test_sorting_rounds_are_reported_to_the_last_even_with_nothing_left() -> None:
    for text in (list(range(9)), [0] * 99):
        rounds: list[tuple[int, int]] = []
        sort_suffixes(np.array(text, np.uint32), 9, on_round=lambda done, of, seen=rounds: seen.append((done, of)))
        assert rounds == [(done, 5) for done in range(1, 6)]


@given(documents=DOCUMENTS, context=CONTEXTS, num_tokens=st.integers(0, 8))
def test_longest_match_its_places_and_likeliest_continuation_are_found(
    documents: list[list[int]], context: list[int], num_tokens: int
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "store"
        store = build(folder, documents)
        tokens, suffixes = stored(folder)
        match = store.find(context)
        assert match.match_len == longest_match(tokens, context)
        if not match.match_len:
            assert match == StoreMatch(0, 0, 0)
            assert store.continuation(match, num_tokens) == []
            return
        places = places_of(tokens, context[-match.match_len :])
        assert sorted(suffixes[match.start : match.stop]) == places
        if len(places) <= MAX_SAMPLED:
            followings = [[*tokens[place + match.match_len :], *[3] * num_tokens] for place in places]
            assert store.continuation(match, num_tokens) == likeliest(followings, num_tokens, 3)


@given(documents=DOCUMENTS, context=CONTEXTS.filter(len), cuts=st.lists(st.integers(0, 24), max_size=4))
def test_guess_does_not_depend_on_how_the_text_arrived(
    documents: list[list[int]], context: list[int], cuts: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        drafter = partial(RetrievalText, build(Path(temporary) / "store", documents), least_match=1)
        followed = drafter(())
        for start, end in pairwise([0, *sorted(min(cut, len(context)) for cut in cuts), len(context)]):
            followed.commit(context[start:end])
            followed.guess(3)
        assert followed.length == len(context)
        assert followed.guess(5) == drafter(context, "any salt").guess(5)


def test_no_guess_runs_from_one_document_into_the_next(tmp_path: Path) -> None:
    store = build(tmp_path / "store", [[0, 1, 2], [2, 1, 0]])
    assert store.find([2, 2]).match_len == 1
    assert store.continuation(store.find([0, 1]), 5) == [2]
    assert RetrievalText(store, [0, 1, 2]).guess(5) == NOTHING
    assert RetrievalText(store, [2, 1]).guess(5) == Guess([0], 2)


def test_document_that_mostly_ends_there_is_not_continued(tmp_path: Path) -> None:
    store = build(tmp_path / "store", [[0, 1], [0, 1], [0, 1, 2], [1, 2, 2]])
    assert store.continuation(store.find([0, 1]), 4) == []
    assert store.continuation(store.find([2]), 4) == []
    assert store.continuation(store.find([1]), 4) == [2, 2], "of equally frequent ones the lower, and an end is highest"


def test_likeliest_path_is_followed_not_the_likeliest_document(tmp_path: Path) -> None:
    store = build(tmp_path / "store", [[0, 1, 1, 1], [0, 1, 1, 1], [0, 2, 0], [0, 2, 1], [0, 2, 2]])
    assert store.continuation(store.find([0]), 4) == [2, 0]


def test_of_many_places_a_few_are_read_evenly(tmp_path: Path) -> None:
    documents = [[0, 1 + index % 10 // 7, 2] for index in range(5000)]
    store = build(tmp_path / "store", documents)
    match = store.find([0])
    assert match.stop - match.start == 5000
    assert store.continuation(match, 3) == [1, 2]


def test_matches_that_are_too_short_are_no_ground_for_a_guess(tmp_path: Path) -> None:
    store = build(tmp_path / "store", [[0, 1, 2, 0, 0]])
    assert RetrievalText(store, [2, 2, 1, 2], least_match=3).guess(2) == NOTHING
    assert RetrievalText(store, [0, 1, 2], least_match=3).guess(2) == Guess([0, 0], 3)


def test_what_is_no_token_matches_nothing_and_hides_what_is_before_it(tmp_path: Path) -> None:
    store = build(tmp_path / "store", [[0, 1, 2], [0, 1, 2]])
    for beyond in (3, 70_000, 2**40, -1):
        assert store.find([0, 1, beyond]).match_len == 0
        assert store.find([0, beyond, 1]).match_len == 1
    assert store.find([]).match_len == 0


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(1, 2), (65_535, 2), (65_536, 4), (200_000, 4)])
def test_separator_has_an_id_in_every_vocabulary(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    last = vocab_size - 1
    store = build(tmp_path / "store", [[last] * 5, [last] * 3], vocab_size)
    size = (tmp_path / "store" / "tokens.bin").stat().st_size
    assert size == store.index.num_tokens * itemsize
    assert store.index.num_bytes == size + (tmp_path / "store" / "suffixes.bin").stat().st_size
    assert store.find([last] * 4).match_len == 4
    assert store.continuation(store.find([last] * 4), 3) == [last]


def test_suffixes_of_eight_bytes_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = build(folder, [[0, 1, 2, 0, 1, 1], [2, 0, 1]])
    contexts = ([0], [1], [2, 0], [0, 1], [2, 0, 1, 1])
    expected = [store.find(context) for context in contexts]
    expected_tokens = [store.continuation(match, 4) for match in expected]
    np.array(stored(folder)[1], np.uint64).tofile(folder / "suffixes.bin")
    change_index(suffix_dtype=np.dtype(np.uint64).str)(folder)
    wide = RetrievalStore.open(folder, FINGERPRINT)
    assert [wide.find(context) for context in contexts] == expected
    assert [wide.continuation(match, 4) for match in expected] == expected_tokens


def test_look_up_takes_microseconds(tmp_path: Path) -> None:
    """A bound that only a search through the tokens would miss: 300,000 of them, 100 guesses."""
    generator = np.random.default_rng(0)
    store = build(tmp_path / "store", [(generator.zipf(1.3, 300_000) % 1000).tolist()], 1000)
    drafter = partial(RetrievalText, store)
    texts = [drafter((generator.zipf(1.3, 20) % 1000).tolist()) for _ in range(100)]
    started = time.perf_counter()
    for text in texts:
        text.guess(8)
    assert (time.perf_counter() - started) / 100 < 2e-3


# What cannot be opened


def change_index(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "index.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "index.json").unlink(), r"no retrieval store at .*: it has no index.json"),
        (lambda folder: (folder / "index.json").write_text("{"), r"index.json cannot be read"),
        (lambda folder: (folder / "index.json").write_bytes(b"\xff"), r"index.json cannot be read"),
        (lambda folder: (folder / "index.json").write_text("[]"), r"is not the index of a retrieval store"),
        (lambda folder: (folder / "index.json").write_text("{}"), r"is not the index of a retrieval store"),
        (change_index(format_version=2, more=1), r"has format 2; this release reads up to 1"),
        (change_index(token_dtype="<u2"), r"types that this machine does not read"),
        (change_index(suffix_dtype=">f8"), r"types that this machine does not read"),
        (change_index(vocabulary_fingerprint="00" * 32), rf"0{{12}}, the target's has {FINGERPRINT.hex()[:12]}"),
        (cut("tokens.bin", 7), r"tokens.bin was cut short: 8 bytes expected, 7 found"),
        (cut("suffixes.bin", 4), r"suffixes.bin was cut short: 16 bytes expected, 4 found"),
        (cut("suffixes.bin", 0), r"suffixes.bin was cut short: 16 bytes expected, 0 found"),
        (lambda folder: (folder / "tokens.bin").unlink(), r"tokens.bin was cut short: 8 bytes expected, 0 found"),
    ],
)
def test_store_that_is_not_whole_or_of_another_kind_is_refused(
    tmp_path: Path, harm: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "store"
    build(folder, [[0, 1]])
    harm(folder)
    with pytest.raises(InvalidRequestError, match=message) as refused:
        RetrievalStore.open(folder, FINGERPRINT)
    assert "\n" not in str(refused.value)


def test_folder_that_is_none_has_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(InvalidRequestError, match="no retrieval store at"):
            RetrievalStore.open(folder, FINGERPRINT)


# Building


class InterruptedBuildError(Exception):
    pass


def test_interrupted_build_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "store"

    def interrupt(*_: object) -> Iterator[np.ndarray]:
        yield np.array([2, 2, 2])
        raise InterruptedBuildError

    def interrupt_sorting(*_: object) -> None:
        raise InterruptedBuildError

    for before in ([], [folder]):
        with pytest.raises(InterruptedBuildError):
            build_store(folder, interrupt(), FINGERPRINT, 3, replace=True)
        with pytest.raises(InterruptedBuildError):
            build_store(folder, [np.array([2])], FINGERPRINT, 3, replace=True, on_round=interrupt_sorting)
        assert list(folder.parent.iterdir()) == before
        if not before:
            build(folder, [[0, 1]])
    assert stored(folder)[0] == [0, 1, 3, 3]


def test_store_that_is_replaced_stays_usable_where_it_is_open(tmp_path: Path) -> None:
    old = build(tmp_path / "store", [[0, 1, 2]])
    new = build(tmp_path / "store", [[0, 1, 0]], replace=True)
    assert [store.continuation(store.find([0, 1]), 1) for store in (old, new)] == [[2], [0]]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_folder_with_other_contents_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    build(tmp_path / "store", [[0]])
    with pytest.raises(InvalidRequestError, match="holds a retrieval store already"):
        build(tmp_path / "store", [[1]])
    (tmp_path / "store" / "notes").touch()
    with pytest.raises(InvalidRequestError, match="is not empty, and is not a retrieval store"):
        build(tmp_path / "store", [[1]], replace=True)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([], "the texts have none"),
        ([[], [3], [3, 3]], "the texts have none"),
        ([[0, 4]], "token 4 is beyond the vocabulary, which has 3 entries"),
    ],
)
def test_tokens_that_no_store_can_have_are_refused(tmp_path: Path, arrays: list[list[int]], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        build_store(tmp_path / "store", (np.array(ids, np.int64) for ids in arrays), FINGERPRINT, 3)
    assert list(tmp_path.iterdir()) == []


# Texts


def letters() -> Tokenizer:
    """Returns a tokenizer of letters, which cuts texts and pads them."""
    tokenizer = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate("?abc\n\r")}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    return tokenizer


def test_texts_become_documents_whatever_they_are_cut_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["abc\nab\r\nc", "", "a" * 40 + "\n", "é\n\nb"]
    files = [tmp_path / str(number) for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(text.encode())
    expected = [number for text in texts for number in (*(max(0, "?abc\n\r".find(one)) for one in text), 6)]
    for piece, batch in ((1, 1), (3, 7), (5, 1000), (1000, 1000)):
        monkeypatch.setattr(store_building, "PIECE_CHARACTERS", piece)
        monkeypatch.setattr(store_building, "BATCH_CHARACTERS", batch)
        read: list[int] = []
        assert np.concatenate(list(read_tokens(files, letters(), 6, read.append))).tolist() == expected
        assert sum(read) == check_files(files) == sum(len(text.encode()) for text in texts)


def test_pieces_of_a_text_end_with_a_line_unless_it_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_building, "PIECE_CHARACTERS", 4)
    (tmp_path / "text").write_text("ab\ncdef\n" + "g" * 10)
    assert list(store_building._pieces(tmp_path / "text")) == ["ab\ncdef\n", "gggggggg", "gg"]


def test_text_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    for path, message in (("latin", "latin is not UTF-8 text"), ("none", "none cannot be read: No such file")):
        with pytest.raises(InvalidRequestError, match=message):
            check_files([tmp_path / path])
        with pytest.raises(InvalidRequestError, match=message):
            list(read_tokens([tmp_path / path], letters(), 6))


def test_store_of_a_models_own_tokens_continues_its_texts(tmp_path: Path) -> None:
    words = ["the", "cat", "sat", "on", "mat"]
    card = load_card(str(save_tiny_model(tmp_path / "model", len(words), tokens=words)))
    (tmp_path / "text").write_text("the cat sat on the mat\n" * 3)
    tokens = read_tokens([tmp_path / "text"], card.tokenizer.backend_tokenizer, 5)
    build_store(tmp_path / "store", tokens, card.description.vocabulary_fingerprint, 5)
    store = RetrievalStore.open(tmp_path / "store", card.description.vocabulary_fingerprint)
    assert RetrievalText(store, [1, 2]).guess(4) == Guess([3, 0, 4, 0], 2)


def test_random_texts_of_every_size_are_found_again(tmp_path: Path) -> None:
    """What is in the store is found at all of its lengths, in groups that are larger than what is sorted together."""
    generator = random.Random(1)
    tokens = [generator.choice((0, 0, 0, 1, 2)) for _ in range(3000)]
    build(tmp_path / "store", [tokens])
    store = RetrievalStore.open(tmp_path / "store", FINGERPRINT)
    for _ in range(200):
        end, length = generator.randrange(40, 3000), generator.randrange(1, 40)
        assert store.find(tokens[end - length : end]).match_len == min(length, MAX_MATCH)
