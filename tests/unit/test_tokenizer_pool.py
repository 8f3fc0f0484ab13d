"""Prompts beyond the context are refused unread, and no prompt waits for longer ones or for one caller's many."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import describe
from hypothesis import example, given, settings
from hypothesis import strategies as st
from observing import until
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.runtime import time_limits
from draftwire_gateway.text import tokenizer_pool
from draftwire_gateway.text.character_bound import characters_per_token
from draftwire_gateway.text.tokenizer_pool import MAX_PROMPT_CHARACTERS, SHORT_CHARACTERS, TokenizerPool

TOKENIZER_FOLDER = Path(__file__).parents[2] / "models" / "target"
CONTEXT_LENGTH = 100
LONG = "l" * (SHORT_CHARACTERS + 1)


class GatedTokenizer:
    """Makes a token of each text, as soon as it is let go; long ones only."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.begun: list[str] = []
        self.num_running = self.most_running = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        assert threading.current_thread().daemon, "a text that is never tokenised keeps the process alive"
        self.begun.append(text[:2])
        if len(text) > SHORT_CHARACTERS:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
            self.released.wait(20.0)
            self.num_running -= 1
        return {"input_ids": [len(text)]}


@pytest.fixture
def gated() -> Iterator[GatedTokenizer]:
    tokenizer = GatedTokenizer()
    yield tokenizer
    tokenizer.released.set()


def pool_of(tokenizer: Any, context_length: int = CONTEXT_LENGTH) -> TokenizerPool:
    return TokenizerPool(tokenizer, describe("target", context_length))


async def begun(count: int, gated: GatedTokenizer) -> None:
    """Waits until so many texts are being tokenised or were."""
    await until(lambda: len(gated.begun) >= count, f"{count} texts are begun")


async def test_short_prompt_does_not_wait_for_long_ones_tokenised_one_by_one(
    gated: GatedTokenizer,
) -> None:
    pool = pool_of(gated)
    long = [asyncio.create_task(pool.encode(LONG, "")) for _ in range(8)]
    await begun(1, gated)
    assert await pool.encode("short", "") == [5]
    gated.released.set()
    assert await asyncio.gather(*long) == [[len(LONG)]] * 8
    assert gated.most_running == 1


async def test_callers_take_turns_and_each_is_served_in_order(gated: GatedTokenizer) -> None:
    pool = pool_of(gated)
    asked = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("a", "a4"), ("c", "c1"), ("b", "b2")]
    tasks = []
    for caller, name in asked:
        tasks.append(asyncio.create_task(pool.encode(name + LONG, caller)))
        await asyncio.sleep(0)
    await begun(1, gated)
    gated.released.set()
    await asyncio.gather(*tasks)
    assert gated.begun == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_cancelled_prompts_lose_their_turn_and_nobody_elses(gated: GatedTokenizer) -> None:
    pool = pool_of(gated)
    names = ["a0", "a1", "a2", "a3"]
    tasks = [asyncio.create_task(pool.encode(name + LONG, "")) for name in names]
    await begun(1, gated)
    for cancelled in (0, 2):
        tasks[cancelled].cancel()
    gated.released.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, list) for result in results] == [False, True, False, True]
    assert gated.begun == ["a0", "a1", "a3"]
    assert await pool.encode(LONG, "") == [len(LONG)]


@pytest.mark.slow
async def test_slow_prompt_is_given_up_and_those_that_waited_for_it_may_retry(
    gated: GatedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_pool, "TOKENIZE_SECONDS", 2.0)
    monkeypatch.setattr(time_limits, "LATE", 0.9)  # a busy machine may begin late
    pool = pool_of(gated)
    asked = [asyncio.create_task(pool.encode(LONG, ""))]
    await begun(1, gated)
    asked += [asyncio.create_task(pool.encode(LONG, "")) for _ in range(2)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results] == [InvalidRequestError, NoRoomError, NoRoomError]
    assert gated.begun == ["ll"], "what nobody waits for any more is not begun"
    monkeypatch.setattr(tokenizer_pool, "TOKENIZE_SECONDS", 20.0)
    gated.released.set()
    assert await pool.encode(LONG, "") == [len(LONG)]


async def test_too_many_waiting_prompts_are_refused_at_once(
    gated: GatedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_pool, "MAX_WAITING", 3)
    pool = pool_of(gated)
    waiting = [asyncio.create_task(pool.encode(LONG, "")) for _ in range(3)]
    await begun(1, gated)
    with pytest.raises(NoRoomError, match="limit"):
        await pool.encode("short", "")
    gated.released.set()
    await asyncio.gather(*waiting)
    assert await pool.encode("short", "") == [5], "those that have gone do not count"


# The bound


def byte_level(normalizer: Any = None, **options: Any) -> PreTrainedTokenizerBase:
    """Bytes, and "aaa"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*alphabet, "aa", "aaa"])}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "a"), ("aa", "a")]))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if options:
        backend.add_special_tokens([AddedToken("<x>", **options)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_fallback(**options: Any) -> PreTrainedTokenizerBase:
    names = ["<unk>", "▁", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, [], **options))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def words(pre_tokenizer: Any) -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def without_spaces(first: Any) -> PreTrainedTokenizerBase:
    made = byte_level()
    parts = [first, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return made


BOUNDED = {
    "byte level": (byte_level(), 3),
    "byte level, composed": (byte_level(normalizers.NFC()), 12),
    "byte level, composed and shortened": (
        byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("bb", "b"), normalizers.NFD()])),
        24,
    ),
    "byte level, a special token": (byte_level(normalized=False), 3),
    "byte fallback": (byte_fallback(byte_fallback=True, unk_token="<unk>", fuse_unk=True), 6),
    "unknown characters are tokens": (byte_fallback(unk_token="<unk>"), 6),
    "the embedded pair": (AutoTokenizer.from_pretrained(TOKENIZER_FOLDER), 41),
}
UNBOUNDED = {
    "unknown characters are one token": byte_fallback(unk_token="<unk>", fuse_unk=True),
    "unknown characters are dropped": byte_fallback(),
    "spaces are dropped": without_spaces(pre_tokenizers.WhitespaceSplit()),
    "spaces are split off": without_spaces(pre_tokenizers.Split(" ", "removed")),
    "accents are dropped": byte_level(normalizers.StripAccents()),
    "a text is replaced by none": byte_level(normalizers.Replace("b", "")),
    "a special token takes the spaces before it": byte_level(lstrip=True),
    "words": words(pre_tokenizers.Whitespace()),
    "no backend": GatedTokenizer(),
}
PIECE = st.sampled_from([*"aab \n é漢😀", "\u0301", "e\u0301", "\u03b1\u0313\u0300\u0345", "<x>"])
TEXT = st.lists(PIECE, max_size=60).map("".join)


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=30)
@given(text=TEXT)
@example(text="a" * 300)
@example(text="\u03b1\u0313\u0300\u0345" * 50)
def test_no_text_of_more_characters_than_the_bound_allows_fits(name: str, text: str) -> None:
    tokenizer, bound = BOUNDED[name]
    assert characters_per_token(tokenizer) == bound
    assert len(text) <= bound * len(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokenizer_that_may_drop_characters_has_no_bound(name: str) -> None:
    assert characters_per_token(UNBOUNDED[name]) is None


@pytest.mark.parametrize(("excess", "num_calls"), [(0, 1), (1, 0), (10**6, 0)])
async def test_prompt_with_more_characters_than_the_context_is_not_tokenised(
    excess: int, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, bound = BOUNDED["byte level"]
    calls: list[int] = []

    class Counting:
        backend_tokenizer = tokenizer.backend_tokenizer

        def __call__(self, text: str) -> Any:
            calls.append(len(text))
            return tokenizer(text)

    pool, text = pool_of(Counting()), "a" * (CONTEXT_LENGTH * bound + excess)
    if excess:
        with pytest.raises(InvalidRequestError, match=f"{len(text)} characters, of which a token has 3 at most"):
            await pool.encode(text, "")
    else:
        assert len(await pool.encode(text, "")) >= CONTEXT_LENGTH
    assert len(calls) == num_calls


async def test_prompt_of_a_tokenizer_without_a_bound_has_a_limit_too(gated: GatedTokenizer) -> None:
    gated.released.set()
    pool = pool_of(gated)
    assert await pool.encode("x" * MAX_PROMPT_CHARACTERS, "") == [MAX_PROMPT_CHARACTERS]
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_PROMPT_CHARACTERS} characters"):
        await pool.encode("x" * (MAX_PROMPT_CHARACTERS + 1), "")
    assert len(gated.begun) == 1
