"""A few rounds of a fixed chain through the gateway's loop and the schedulers and engines of drafter and verifier.

    python -m tests.one_process         # prints what was loaded for them

All in one process, without cores, servers and messages: what `sys.modules` holds afterwards is what a round needs.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.engine.admission import Room
from draftwire.engine.prefill import PrefillPacer
from draftwire.method.encoding import Claim, decode_one
from draftwire.method.rounds import (
    Calibration,
    DraftBlock,
    DraftSessionSpec,
    PlainRun,
    ReceivedBlock,
    SendDrafted,
    TargetSessionSpec,
    Verdict,
)
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.description import ModelDescription
from draftwire.models.torch_models import torch_model
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES
from draftwire.verification.rule import facts_of
from draftwire_drafter.engine import DraftEngine
from draftwire_drafter.scheduler import Scheduler as DraftScheduler
from draftwire_gateway.session.committed_text import Delta
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.loop import GenerationLoop, SessionPlugs
from draftwire_gateway.session.loop_settings import LoopSettings
from draftwire_gateway.session.policy import FixedPolicy
from draftwire_gateway.session.ports import Inbox
from draftwire_gateway.session.round_trip_estimate import RoundTripEstimate
from draftwire_gateway.text.text import TextStream
from draftwire_verifier.engine import TargetEngine
from draftwire_verifier.scheduler import Scheduler as TargetScheduler
from tests.tiny_models import tiny_network

VOCAB_SIZE = 11
CONTEXT_LENGTH = 64
CACHE_TOKENS = 512
NUM_TOKENS = 24
BLOCK_LENGTH = 3
DRAFTER_ID = 7
ADDRESS = "verifier:1"


class Letters:
    """A tokenizer: one letter for each token."""

    all_special_ids = ()
    added_tokens_decoder: Mapping[int, Any] = {}
    get_vocab = get_added_vocab = dict

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join("abcdefghijk"[token] for token in ids)


def describe(name: str, **facts: Any) -> ModelDescription:
    """Returns what a service says of its model."""
    return ModelDescription(name, "", "float64", b"", VOCAB_SIZE, CONTEXT_LENGTH, (), **facts)


def limits() -> dict[str, Any]:
    """Returns what a scheduler keeps to."""
    return {
        "context_length": CONTEXT_LENGTH,
        "max_draft_tokens": 8,
        "room": Room(8, CACHE_TOKENS),
        "pacer": PrefillPacer(10.0),
    }


def model_of(seed: int) -> CachedModel:
    """Returns a tiny model of our own decoder."""
    return torch_model(decoder_of(tiny_network("llama", VOCAB_SIZE, CONTEXT_LENGTH, seed), "lean"), CACHE_TOKENS)


class Target:
    """A verifier's scheduler and engine, as the gateway sees it."""

    address, zone = ADDRESS, None

    def __init__(self) -> None:
        self.description = describe("target", rules=tuple(map(facts_of, RULES.values())))
        self._scheduler = TargetScheduler(vocab_size=VOCAB_SIZE, **limits())
        self._engine = TargetEngine(model_of(1), CONTEXT_LENGTH)
        self._inboxes: dict[tuple[int, int], Inbox] = {}
        self.judged: list[Verdict] = []

    def takes_blocks_of(self, drafter_id: int) -> bool:
        return True

    async def open(self, spec: TargetSessionSpec, inbox: Inbox) -> None:
        self._inboxes[spec.session_id, spec.epoch] = inbox
        self._scheduler.open(spec, 0)
        self._run()

    def run_plain(self, run: PlainRun) -> None:
        self._scheduler.run_plain(run)
        self._run()

    def push(self, block: DraftBlock) -> None:
        decoded = decode_one(Claim(block.token_ids, block.distributions), VOCAB_SIZE)
        received = ReceivedBlock(block.fence, block.token_ids, decoded, True, DRAFTER_ID, permit=block.permit)
        self._scheduler.take_permit(received)
        self._scheduler.offer_block(received)
        self._run()

    def close(self, session_id: int, epoch: int) -> None:
        self._scheduler.close(session_id, epoch)
        self._engine.forget((session_id, epoch))

    def _run(self) -> None:
        while step := self._scheduler.next_step():
            for session, event in self._scheduler.complete(step, self._engine.step(step)):
                assert isinstance(event, Verdict)
                self.judged.append(event)
                self._inboxes[session.key].put_nowait(event)


class Drafter:
    """A drafter's scheduler and engine, as the gateway sees it."""

    instance_id = DRAFTER_ID

    def __init__(self, push: Callable[[DraftBlock], None]) -> None:
        self.description = describe("drafter", capabilities=frozenset({"issued_identities"}))
        self.round_trip = RoundTripEstimate()
        self._scheduler = DraftScheduler(**limits())
        self._engine = DraftEngine(LanguageModelDrafter(model_of(2), CONTEXT_LENGTH))
        self._push = push

    def known_as(self, address: str) -> int:
        return DRAFTER_ID

    async def open(self, spec: DraftSessionSpec, inbox: Inbox) -> None:
        self._scheduler.open(spec, 0)
        self._run()

    def calibrate(self, calibration: Calibration) -> None:
        self._scheduler.calibrate(calibration)
        self._run()

    def send_drafted(self, command: SendDrafted) -> None:
        raise AssertionError("its blocks are there at once")

    def close(self, session_id: int, epoch: int) -> None:
        self._scheduler.close(session_id, epoch)
        self._engine.forget((session_id, epoch))

    def _run(self) -> None:
        while step := self._scheduler.next_step():
            for completed in self._scheduler.complete(step, self._engine.step(step)):
                if isinstance(completed.outcome, DraftBlock):
                    self._push(completed.outcome)


class Both:
    """The peers of the gateway."""

    def __init__(self) -> None:
        self.target = Target()
        self.drafter = Drafter(self.target.push)

    def targets(self) -> Sequence[Target]:
        return [self.target]

    def why_no_target(self) -> str:
        return ""

    def last_usable_at(self) -> float:
        return asyncio.get_running_loop().time()

    def draft_models(self) -> Collection[str]:
        return ["drafter"]

    def drafters_for(self, target: Target, but: Collection[int]) -> Sequence[Drafter]:
        return [] if DRAFTER_ID in but else [self.drafter]


async def generate() -> tuple[list[int], list[Verdict]]:
    """Returns the tokens of a text, and the verdicts of its rounds."""
    peers = Both()
    generation = Generation(
        prompt_ids=[1, 2, 3],
        sampling=SamplingParams(temperature=1.0),
        max_tokens=NUM_TOKENS,
        stop=(),
        stop_token_ids=frozenset(),
        seed=5,
        num_speculative_tokens=BLOCK_LENGTH,
        rule=facts_of(RULES["block"]),
    )
    text = TextStream(Letters(), generation.prompt_ids, ())  # type: ignore[arg-type]
    ids: list[int] = []
    async for event in loop_of(generation, peers, text).run():
        if isinstance(event, Delta):
            ids += event.token_ids
    return ids, peers.target.judged


def loop_of(generation: Generation, peers: Any, text: TextStream) -> GenerationLoop:
    """Returns the loop of a text whose drafts have a fixed length."""
    return GenerationLoop(generation, peers, text, LoopSettings(), SessionPlugs(FixedPolicy(BLOCK_LENGTH)))


def main() -> None:
    """Prints JSON: how many rounds had draft tokens, and the modules that were loaded."""
    torch.set_num_threads(1)
    ids, verdicts = asyncio.run(generate())
    assert len(ids) == NUM_TOKENS
    drafted = sum(verdict.num_draft_tokens > 0 for verdict in verdicts)
    print(
        json.dumps({"drafted_rounds": drafted, "modules": sorted(name for name in sys.modules if "draftwire" in name)})
    )


if __name__ == "__main__":
    main()
