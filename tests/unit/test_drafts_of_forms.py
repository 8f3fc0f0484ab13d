"""A drafter drafts within the form of a text for as long as it can follow it, and without it where it cannot."""

import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from observing import until
from tiny_models import save_spelling_model

from draftwire.method.rounds import Calibration, CommittedTokens, DraftBlock, Fence
from draftwire.models.card import ModelCard
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.structured_output import StructuredOutput
from draftwire.runtime.settings import ModelSettings
from draftwire_drafter.config import DrafterConfig
from draftwire_drafter.core import DrafterCore
from draftwire_drafter.verifier_links import BlockLink
from tests.unit.test_drafter_core import PROMPT, FakeLink, Rig

TOKENS = ["a", "b", "ab", "c", "<e>"]
STOP = 4
EXPRESSION = "(ab{1,2}c)*"
ENDS = ("", "c", "bc")
"""What is missing, at most, from the beginning of a text of the form."""
FORM = SamplingParams(structured_output=StructuredOutput.regex(EXPRESSION))


@asynccontextmanager
async def opened(folder: Path, sampling: SamplingParams, stop_token_id: int | None = STOP) -> AsyncIterator["Writer"]:
    """A drafter of a tiny model, with a session open."""
    save_spelling_model(folder, TOKENS, stop_token_id, seed=5, context_length=256)
    links: dict[str, list[FakeLink]] = {}

    async def connect(address: str, card: ModelCard, on_lost: Callable[[], None]) -> BlockLink:
        return links.setdefault(address, [FakeLink(on_lost)])[0]

    core = DrafterCore(DrafterConfig(ModelSettings(str(folder), threads=1)), connect)
    await core.start()
    lease_id, outbox = core.open_lease()
    async with Rig.running_of(core, links, lease_id, outbox._items) as rig:
        await rig.open(1, sampling=sampling)
        yield Writer(rig)


class Writer:
    """Commits what it likes of what a drafter drafts."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.ids: list[int] = []
        """Committed behind the prompt."""
        self._committed = CommittedTokens(PROMPT)
        self._num_rounds = 0

    async def draft(self, new: list[int], num_draft_tokens: int = 4) -> list[int]:
        """Commits tokens, and returns what is drafted behind them."""
        base_len, number = len(self._committed), self._num_rounds
        self._committed.append(new)
        self.ids += new
        fence = Fence(1, 0, number, len(self._committed), self._committed.hash)
        self.rig.core.calibrate(Calibration(fence, base_len, new, num_draft_tokens))
        self._num_rounds += 1
        await until(lambda: self.rig.events or len(self._blocks) > number, f"block {number} is sent")
        assert not self.rig.events
        return self._blocks[number].token_ids

    @property
    def _blocks(self) -> list[DraftBlock]:
        return self.rig.links["a:1"][0].blocks


def begins(ids: list[int]) -> bool:
    """Whether tokens are the beginning of a text of the form, or one with its end."""
    is_ended = STOP in ids
    text = "".join(TOKENS[token] for token in (ids[: ids.index(STOP)] if is_ended else ids))
    return any(re.fullmatch(EXPRESSION, text + end) for end in ENDS[: 1 if is_ended else None])


@pytest.mark.parametrize("seed", range(3))
async def test_drafts_keep_to_the_form_after_any_rejections(tmp_path: Path, seed: int) -> None:
    generator, num_rejected, num_drafted = random.Random(seed), 0, 0
    async with opened(tmp_path, FORM) as writer:
        new: list[int] = []
        for _ in range(25):
            drafted = await writer.draft(new, generator.randint(1, 5))
            assert drafted
            assert begins(writer.ids + drafted)
            num_drafted += len(drafted)
            new = drafted[: generator.randint(0, len(drafted))]
            new = new[: new.index(STOP)] if STOP in new else new
            num_rejected += len(drafted) - len(new)
            new = [*new, generator.choice([one for one in range(STOP) if begins([*writer.ids, *new, one])])]
    assert num_drafted > 40
    assert num_rejected > 20


async def test_drafter_that_cannot_read_the_form_drafts_without_it(tmp_path: Path) -> None:
    async with opened(tmp_path, FORM, stop_token_id=None) as writer:
        drafts = [[*writer.ids, one, *await writer.draft([one])] for one in [0, 1, 3] * 5]
    assert [len(ids) for ids in drafts] == list(range(5, 20))
    assert sum(begins(ids) for ids in drafts) < 5


async def test_drafter_that_loses_the_form_on_the_way_drafts_without_it(tmp_path: Path) -> None:
    """It has neither the token x nor the target's id for it, which is beyond its own vocabulary."""
    beyond = replace(FORM, structured_output=StructuredOutput.regex("(ax|b)*"))
    async with opened(tmp_path, beyond) as writer:
        assert (await writer.draft([1], num_draft_tokens=1))[0] in (0, 1, STOP)
        drafts = [await writer.draft(new) for new in ([0], [len(TOKENS)], [1], [0])]
    assert [len(drafted) for drafted in drafts] == [4] * 4
