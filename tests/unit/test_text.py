"""Tokens to text: what is shown is never taken back, whatever the tokens and however the text arrives."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftwire_gateway.text.text import MAX_AT_ONCE, REPLACEMENT, IncrementalDetokenizer, StopStrings, TextStream

TOKENIZER_FOLDER = Path(__file__).parents[2] / "models" / "target"
LARGEST_ID = 4095

TRICKY_TEXT = st.text(st.sampled_from([*"ab \n.éüßñ你好漢字ऄ😀🎉👩", "\u200d", REPLACEMENT]), max_size=12)
CUT = st.floats(0.0, 1.0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TOKENIZER_FOLDER)


@pytest.fixture(scope="module")
def partial_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that are no whole character by themselves."""
    assert tokenizer.all_special_ids == [0]
    ids = [i for i in range(LARGEST_ID + 1) if REPLACEMENT in tokenizer.decode([i])]
    assert len(ids) >= 128
    return ids


def decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces_of(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push([token]) for token in ids), detokenizer.finish()]


def chunked(text: str, borders: list[float]) -> list[str]:
    """Cuts a text at the given fractions of its length."""
    places = sorted({0, len(text), *(round(border * len(text)) for border in borders)})
    return [text[a:b] for a, b in pairwise(places)]


def before_first_completed(text: str, stops: tuple[str, ...]) -> str:
    """Generation ends with the character that completes a stop string, so the one completed first counts."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


# IncrementalDetokenizer


@settings(max_examples=150)
@given(prompt=TRICKY_TEXT.filter(bool), continuation=TRICKY_TEXT, start=CUT, end=CUT)
def test_pieces_join_to_the_decoding_of_text_that_is_cut_inside_characters(
    tokenizer: PreTrainedTokenizerBase, prompt: str, continuation: str, start: float, end: float
) -> None:
    prompt_ids = tokenizer(prompt)["input_ids"]
    ids = tokenizer(continuation)["input_ids"]
    ids = ids[round(start * len(ids)) :][: round(end * len(ids))]  # the cut makes invalid UTF-8 at either end
    pieces = pieces_of(IncrementalDetokenizer(tokenizer, prompt_ids), ids)
    assert "".join(pieces) == decoded(tokenizer, prompt_ids + ids)[len(decoded(tokenizer, prompt_ids)) :]


@settings(max_examples=150)
@given(data=st.data(), prompt_len=st.integers(1, 6))
def test_pieces_join_to_the_decoding_of_any_tokens_behind_any_prompt(
    tokenizer: PreTrainedTokenizerBase, partial_ids: list[int], data: st.DataObject, prompt_len: int
) -> None:
    """Random ids, most of them bytes of characters, so that nearly every sequence is invalid somewhere.

    The prompt has no special token, which is no text: four of them behind an unfinished character would hide it.
    """
    text_id = st.one_of(st.sampled_from(partial_ids), st.integers(1, LARGEST_ID))
    prompt_ids = data.draw(st.lists(text_id, min_size=prompt_len, max_size=prompt_len))
    ids = data.draw(st.lists(st.one_of(text_id, st.just(tokenizer.eos_token_id)), max_size=30))
    pieces = pieces_of(IncrementalDetokenizer(tokenizer, prompt_ids), ids)
    assert "".join(pieces) == decoded(tokenizer, prompt_ids + ids)[len(decoded(tokenizer, prompt_ids)) :]


@settings(max_examples=100)
@given(data=st.data())
def test_a_replacement_character_that_was_shown_never_becomes_a_real_one(
    tokenizer: PreTrainedTokenizerBase, partial_ids: list[int], data: st.DataObject
) -> None:
    """After every token, what was shown is a beginning of the text, whatever tokens come then."""
    ids = data.draw(st.lists(st.sampled_from(partial_ids), max_size=12))
    ids += tokenizer(data.draw(TRICKY_TEXT))["input_ids"]
    prompt_ids = tokenizer("x")["input_ids"]
    detokenizer, shown = IncrementalDetokenizer(tokenizer, prompt_ids), ""
    for length, token in enumerate(ids, start=1):
        shown += detokenizer.push([token])
        for completed in range(length, len(ids) + 1):
            assert decoded(tokenizer, prompt_ids + ids[:completed])[1:].startswith(shown)


@settings(max_examples=60)
@given(text=TRICKY_TEXT.map(lambda text: text.replace(REPLACEMENT, "")))
def test_text_is_shown_as_soon_as_its_characters_are_whole(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    prompt_ids, ids = tokenizer("x")["input_ids"], tokenizer(text)["input_ids"]
    detokenizer, shown = IncrementalDetokenizer(tokenizer, prompt_ids), ""
    for length, token in enumerate(ids, start=1):
        shown += detokenizer.push([token])
        whole = decoded(tokenizer, prompt_ids + ids[:length])[1:].rstrip(REPLACEMENT)
        assert shown == whole
    assert (detokenizer.finish(), shown) == ("", text)


@settings(max_examples=100)
@given(
    parts=st.lists(st.tuples(TRICKY_TEXT, st.integers(0, 200)), max_size=5),
    is_metaspace=st.booleans(),
    chunk=st.integers(1, 8),
)
def test_tokens_without_text_change_nothing_and_are_not_kept(
    tokenizer: PreTrainedTokenizerBase, parts: list[tuple[str, int]], is_metaspace: bool, chunk: int
) -> None:
    """As after the end of a text that is to go on: the model repeats a special token."""
    used = byte_fallback_tokenizer() if is_metaspace else tokenizer
    (special, *_) = used.all_special_ids
    ids: list[int] = []
    for text, count in parts:
        known = re.sub("[^ab ]", "", text) if is_metaspace else text  # long runs of single bytes are shown as they are
        ids += used(known, add_special_tokens=False)["input_ids"] + [special] * count
    prompt_ids = used("x", add_special_tokens=False)["input_ids"]
    detokenizer = IncrementalDetokenizer(used, prompt_ids)
    pieces = [detokenizer.push(ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
    whole = decoded(used, prompt_ids + ids)
    assert "".join([*pieces, detokenizer.finish()]) == whole.removeprefix(decoded(used, prompt_ids))
    if parts and parts[-1][1] == 200 and REPLACEMENT not in whole:
        assert len(detokenizer._window) <= MAX_AT_ONCE


def test_many_tokens_without_text_are_decoded_only_a_few_times_each(tokenizer: PreTrainedTokenizerBase) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer("x")["input_ids"])
    for _ in range(1000):
        assert detokenizer.push(tokenizer.all_special_ids[:1]) == ""
        assert len(detokenizer._window) <= 4
    assert detokenizer.push(tokenizer("!")["input_ids"]) == "!"


@pytest.mark.parametrize("bytes_in_prompt", [1, 2, 3, 4])
def test_a_character_begun_in_the_prompt_is_not_shown_twice(
    tokenizer: PreTrainedTokenizerBase, bytes_in_prompt: int
) -> None:
    ids, after = tokenizer("😀")["input_ids"], tokenizer("!")["input_ids"]
    prompt_ids = tokenizer("x")["input_ids"] + ids[:bytes_in_prompt]
    pieces = pieces_of(IncrementalDetokenizer(tokenizer, prompt_ids), ids[bytes_in_prompt:] + after)
    assert "".join(pieces) == "!"


def byte_fallback_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer in the manner of Llama 2: characters that the vocabulary lacks become one token per byte."""
    names = ["<unk>", "▁", *"abx", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    fast = Tokenizer(model)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>")


@pytest.mark.parametrize("text", ["a😀b", "é", "a你b😀", "a你好b", "😀😀", "漢字éa"])
def test_pieces_join_to_the_text_with_a_byte_fallback_tokenizer(text: str) -> None:
    """Its decoder turns a run of byte tokens into replacement characters as long as the whole run is invalid."""
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert decoded(tokenizer, ids) == text
    pieces = pieces_of(IncrementalDetokenizer(tokenizer, tokenizer("x")["input_ids"]), ids)
    assert "".join(pieces) == text


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, token_ids: list[int], **options: bool) -> str:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


def lone_bytes(tokenizer: PreTrainedTokenizerBase, names: tuple[str, ...]) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(name) for name in names]


HOSTILE = {
    "one byte again and again": (False, ("\u0122",), 1),
    "beginnings of characters": (False, ("\u00e4",), 1),
    "a character that never ends, with special tokens": (False, ("\u00e4", "<special>", "<special>"), 1),
    "pairs of them, in rounds of five": (False, ("\u00e4", "\u0122"), 5),
    "byte fallback": (True, ("<0xFF>",), 1),
    "byte fallback, whole characters behind an invalid byte": (
        True,
        ("<0xFF>", *["<0xE4>", "<0xBD>", "<0xA0>"] * 50),
        1,
    ),
    "byte fallback, whole characters in rounds that end inside them": (True, ("<0xE4>", "<0xBD>", "<0xA0>"), 5),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_cost_of_bytes_that_are_no_text_grows_with_their_number_alone(
    tokenizer: PreTrainedTokenizerBase, case: str
) -> None:
    """Twice as many tokens, twice as many decoded; and the text is that of all of them at once."""
    is_fallback, names, chunk = HOSTILE[case]
    used = byte_fallback_tokenizer() if is_fallback else tokenizer
    special = used.convert_ids_to_tokens(used.all_special_ids[0])
    unit = lone_bytes(used, tuple(name.replace("<special>", special) for name in names))
    prompt_ids, costs = used("x", add_special_tokens=False)["input_ids"], []
    for count in (990, 1980):
        ids = (unit * count)[:count]
        counting = CountingTokenizer(used)
        stream = TextStream(counting, prompt_ids, ())  # type: ignore[arg-type]
        pieces = [stream.push(ids[start : start + chunk]).text for start in range(0, count, chunk)]
        costs.append(counting.num_decoded)
        assert "".join([*pieces, stream.finish()]) == decoded(used, prompt_ids + ids)[1:]
    assert costs[1] <= 2.2 * costs[0]
    assert costs[1] <= 1980 * 300


# StopStrings

AB_TEXT = st.text("ab", max_size=14)
AB_STOP = st.text("ab", min_size=1, max_size=4)
BORDERS = st.lists(st.floats(0.0, 1.0), max_size=10)


def run_stops(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    strings = StopStrings(stops)
    shown = "".join(strings.push(piece) for piece in pieces)
    return shown + strings.finish(), strings.stopped


@settings(max_examples=600)
@given(text=AB_TEXT, borders=BORDERS, stops=st.lists(AB_STOP, max_size=3).map(tuple))
@example(text="aab", borders=[0.67], stops=("aab", "a"))
@example(text="abba", borders=[0.5, 0.75], stops=("abba", "bb"))
@example(text="ab", borders=[0.5], stops=())
def test_text_is_cut_before_the_first_completed_stop_however_chunked(
    text: str, borders: list[float], stops: tuple[str, ...]
) -> None:
    """Nothing comes after it, and what was held back is released where none comes."""
    expected = before_first_completed(text, stops)
    assert run_stops(chunked(text, borders), stops) == (expected, expected != text)


@settings(max_examples=200)
@given(text=AB_TEXT, borders=BORDERS, stop=AB_STOP)
def test_only_what_could_become_a_stop_string_is_held_back(text: str, borders: list[float], stop: str) -> None:
    strings, shown, seen = StopStrings((stop,)), "", ""
    for piece in chunked(text, borders):
        shown, seen = shown + strings.push(piece), seen + piece
        if strings.stopped:
            assert shown == before_first_completed(seen, (stop,))
            return
        ends = [seen[start:] for start in range(len(seen) + 1)]
        longest = next(end for end in ends if stop.startswith(end))
        assert shown + longest == seen


# TextStream


def run_stream(stream: TextStream, ids: list[int]) -> tuple[str, int]:
    """Pushes tokens as the loop does: until the text stopped. Returns the text and how many tokens it took."""
    shown = ""
    for count, token in enumerate(ids, start=1):
        shown += stream.push([token])[0]
        if stream.stopped:
            return shown + stream.finish(), count
    return shown + stream.finish(), len(ids)


@settings(max_examples=100)
@given(text=TRICKY_TEXT.filter(bool), start=st.integers(0, 11), length=st.integers(1, 5))
def test_stop_string_is_found_across_token_borders(
    tokenizer: PreTrainedTokenizerBase, text: str, start: int, length: int
) -> None:
    text = text.replace(REPLACEMENT, "r") + "end"
    stop = text[start : start + length] or "end"
    stream = TextStream(tokenizer, tokenizer("x")["input_ids"], (stop,))
    shown, _ = run_stream(stream, tokenizer(text)["input_ids"])
    assert shown == before_first_completed(text, (stop,))
    assert stream.stopped


def test_stop_string_ends_the_text_at_the_token_that_completes_it(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("Once upon a time there was")["input_ids"]
    prefixes = [decoded(tokenizer, ids[:length]) for length in range(len(ids) + 1)]
    expected_count = next(length for length, prefix in enumerate(prefixes) if "n a t" in prefix)
    assert 2 <= expected_count < len(ids)
    stream = TextStream(tokenizer, tokenizer("x")["input_ids"], ("n a t",))
    assert run_stream(stream, ids) == ("Once upo", expected_count)


def test_stop_string_in_the_prompt_does_not_count(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = TextStream(tokenizer, tokenizer("the END")["input_ids"], ("END",))
    assert run_stream(stream, tokenizer(" of days")["input_ids"])[0] == " of days"
    assert not stream.stopped


def test_stop_string_completed_by_the_held_back_rest_is_found_at_finish(tokenizer: PreTrainedTokenizerBase) -> None:
    """An unfinished character becomes certain only when the tokens end; a stop string may ask for it."""
    ids = tokenizer("ab😀")["input_ids"][:-1]
    stream = TextStream(tokenizer, tokenizer("x")["input_ids"], ("b" + REPLACEMENT,))
    assert "".join(stream.push([token])[0] for token in ids) == "a"
    assert not stream.stopped
    assert stream.finish() == ""
    assert stream.stopped


@settings(max_examples=100)
@given(text=TRICKY_TEXT.filter(bool), cut=CUT, start=st.integers(0, 11), stops=st.booleans(), at_once=st.booleans())
def test_skipped_text_is_what_would_have_been_shown_whatever_the_pieces(
    tokenizer: PreTrainedTokenizerBase, text: str, cut: float, start: int, stops: bool, at_once: bool
) -> None:
    ids, prompt_ids = tokenizer(text)["input_ids"], tokenizer("x")["input_ids"]
    stop = (text[start : start + 2] or "end",) if stops else ()
    num_skipped = round(cut * len(ids))
    shown, resumed = TextStream(tokenizer, prompt_ids, stop), TextStream(tokenizer, prompt_ids, stop)
    resumed.skip(ids[:num_skipped], frozenset())
    pieces = [ids[:num_skipped]] if at_once else [[token] for token in ids[:num_skipped]]
    before = "".join(shown.push(piece)[0] for piece in pieces)
    whole, _ = run_stream(TextStream(tokenizer, prompt_ids, stop), ids)
    assert resumed.stopped is shown.stopped
    assert before + run_stream(resumed, ids[num_skipped:])[0] == whole


def test_stop_token_at_the_end_of_what_is_skipped_has_no_text(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("the END")["input_ids"]
    stream = TextStream(tokenizer, tokenizer("x")["input_ids"], ("END",))
    stream.skip(ids, frozenset(ids[-1:]))
    assert not stream.stopped
    stream.skip([], frozenset(ids))
    assert not stream.stopped
