"""A scripted pair behaves as its script says, through the real rules and caches."""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import every
from scipy.stats import binomtest
from strategy_loading import load_drafter

from draftwire.drafting.strategy import Draft, Drafting, DraftRequest
from draftwire.engine.model_loading import load_target
from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.local_loop import LocalRun, LoopRound, speculate
from draftwire.method.distributions import rows_of
from draftwire.method.encoding import Claim, decode_one
from draftwire.method.keys import DrawKey
from draftwire.method.quantization import Encoding
from draftwire.models.model_names import SCRIPT_PREFIX, is_scripted
from draftwire.models.script import Script, expected_tokens
from draftwire.models.scripted import ScriptedTarget
from draftwire.models.sequence_model import Reading, SequenceModel
from draftwire.options.ahead.branches import WantedGuesses
from draftwire.options.layer_parallel.layer_settings import LayerParallelSettings
from draftwire.options.scripted.scripted_drafter import ScriptedDrafter
from draftwire.options.trees.growth_plan import GrowthPlan, WantedTree
from draftwire.options.trees.token_tree import TokenTree
from draftwire.options.trees.tree_shapes import survival_of
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire.verification import RULES
from draftwire.verification.deciding import Judgement
from draftwire.verification.target import judge
from tests.cache_integrity import check_integrity
from tests.judged import judging_of

torch.set_num_threads(1)

PROMPT = list(b"def f")
KEY = DrawKey(bytes(16), 0, 0)


def rounds_of(
    script: Script, sampling: SamplingParams, run_tokens: int, block_length: int, rule: str
) -> list[LoopRound]:
    target = ScriptedTarget(script, run_tokens + 64)
    run = LocalRun(sampling, run_tokens, block_length, rule, seed=3)
    rounds = list(speculate(target, ScriptedDrafter(script), PROMPT, run))
    check_integrity(target.cache)
    assert target.cache.sequences == set()
    return rounds


def test_script_is_read_from_a_models_name() -> None:
    text = "verify_ms=5,draft_ms=1.5,calibration_ms=2,read_us=3e1,acceptance=0.8/1/0,vocab_size=512,context_length=99"
    expected = Script(5.0, 1.5, 2.0, 30.0, (0.8, 1.0, 0.0), vocab_size=512, context_length=99)
    assert Script.parse(SCRIPT_PREFIX + text) == Script.parse(text) == expected
    assert Script.parse(SCRIPT_PREFIX) == Script()
    assert Script.parse(SCRIPT_PREFIX + "acceptance=0.5") == Script(acceptance=(0.5,))
    late = Script.parse(SCRIPT_PREFIX + "late_acceptance=0.1/0.2,late_from=30")
    assert [late.acceptance_at(place, 29) for place in (0, 5)] == [0.8, 0.8]
    assert [late.acceptance_at(place, 30) for place in (0, 5)] == [0.1, 0.2]


@every(
    ("text", "named"),
    [
        ("verify=5", "verify"),
        ("verify_ms", "float"),
        ("verify_ms=", "float"),
        ("verify_ms=x", "x"),
        ("verify_ms=-1", "verify_ms"),
        ("draft_ms=nan", "draft_ms"),
        ("calibration_ms=inf", "calibration_ms"),
        ("read_us=-0.1", "read_us"),
        ("draft_row_us=-1", "draft_row_us"),
        ("recovered=1.5", "recovered"),
        ("acceptance=", "float"),
        ("acceptance=0.8/", "float"),
        ("acceptance=1.1", "acceptance"),
        ("acceptance=0.5/-0.1", "acceptance"),
        ("acceptance=nan", "acceptance"),
        ("vocab_size=255", "vocab_size"),
        ("vocab_size=300.5", "300.5"),
        ("context_length=1", "context_length"),
        ("=5", "unknown"),
        ("verify_ms=5;draft_ms=1", "5;draft_ms"),
        (" verify_ms=5", "unknown"),
        ("__class__=5", "__class__"),
        ("verify_ms=5,verify_ms=50", "verify_ms"),
    ],
)
def test_bad_script_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        Script.parse(SCRIPT_PREFIX + text)


def test_script_without_acceptance_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="acceptance"):
        Script(acceptance=())


def test_only_names_with_the_prefix_are_scripts() -> None:
    assert is_scripted("scripted:")
    assert is_scripted("scripted:verify_ms=5")
    assert not is_scripted("models/scripted")
    assert not is_scripted("./scripted:verify_ms=5")


def test_last_acceptance_holds_for_all_further_positions() -> None:
    script = Script(acceptance=(0.9, 0.5))
    assert [script.acceptance_at(position) for position in range(4)] == [0.9, 0.5, 0.5, 0.5]


@every(
    "text", ["", "plain", *map(chr, range(128)), "def f(x):\n\treturn 'é😀' + x  # ok\r\n", " a  b ", "\x00\x7f", "ÿ"]
)
def test_tokens_of_the_card_are_bytes_and_give_the_text_back(text: str) -> None:
    tokenizer = Script().card().tokenizer
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_every_byte_is_a_token_of_the_one_vocabulary_of_all_scripts() -> None:
    card = Script(vocab_size=512, context_length=77).card()
    assert len(set(card.vocabulary)) == len(card.vocabulary) == 256
    assert (card.description.vocab_size, card.description.context_length) == (512, 77)
    assert card.description.stop_token_ids == ()
    assert card.description.vocabulary_fingerprint == Script().card().description.vocabulary_fingerprint


def test_drafter_proposes_the_alphabet_by_position() -> None:
    assert bytes(expected_tokens(0, 28)) == b"abcdefghijklmnopqrstuvwxyzab"
    assert expected_tokens(5, 3) == expected_tokens(0, 8)[5:]
    drafter = ScriptedDrafter(Script())
    sequence = drafter.open(PROMPT, ALONE)
    for sampling in (SamplingParams(), SamplingParams(0.0)):
        (draft,) = drafter.step([Drafting(sequence, DraftRequest(4, sampling, KEY, 320))]).drafts
        assert draft is not None
        assert draft.token_ids == expected_tokens(len(PROMPT), 4)
        rows = rows_of(decode_one(Claim(draft.token_ids, draft.distributions), 320))
        assert torch.equal(rows.dense().argmax(dim=1), torch.tensor(draft.token_ids))


@pytest.mark.slow
@every("rule", [name for name, rule in RULES.items() if rule.is_lossless])
def test_each_position_is_accepted_as_often_as_the_script_says(rule: str) -> None:
    """Exact binomial tests, four for each of three rules: a false alarm has a probability of at most 1.2e-6."""
    acceptance = (0.9, 0.4, 0.75)
    rounds = rounds_of(Script(acceptance=acceptance), SamplingParams(), 2500, 4, rule)
    whole = [one for one in rounds if int(one.blocks.lengths[0]) == 4]
    for position, expected in enumerate((*acceptance, acceptance[-1])):
        tried = sum(one.num_accepted >= position for one in whole)
        accepted = sum(one.num_accepted > position for one in whole)
        assert tried > 150
        assert binomtest(accepted, tried, expected).pvalue > 1e-7


@every("rule", RULES)
def test_text_is_the_alphabet_with_a_capital_for_each_refusal(rule: str) -> None:
    rounds = rounds_of(Script(acceptance=(0.7,)), SamplingParams(), 300, 3, rule)
    text = bytes(token for one in rounds for token in one.token_ids)
    assert text.lower() == bytes(expected_tokens(len(PROMPT), len(text)))
    for one in rounds:
        assert not any(chr(token).isupper() for token in one.token_ids[: one.num_accepted])
        if one.num_accepted < int(one.blocks.lengths[0]):
            assert chr(one.token_ids[-1]).isupper()


@every("rule", RULES)
@every("probability", [0.0, 1.0])
def test_certain_acceptance_and_refusal_are_certain(rule: str, probability: float) -> None:
    rounds = rounds_of(Script(acceptance=(probability,)), SamplingParams(), 200, 4, rule)
    assert all(one.num_accepted == int(one.blocks.lengths[0]) * probability for one in rounds)


@every("rule", RULES)
def test_greedy_decoding_accepts_where_acceptance_is_more_likely_than_not(rule: str) -> None:
    rounds = rounds_of(Script(acceptance=(0.9, 0.6, 0.4, 1.0)), SamplingParams(0.0), 300, 4, rule)
    whole = Counter(one.num_accepted for one in rounds if int(one.blocks.lengths[0]) == 4)
    assert set(whole) == {2}


def test_colder_sampling_accepts_what_is_likely_more_often() -> None:
    """At temperature 1/2 the odds of 0.7 to 0.3 are squared. False alarm: at most 1e-7."""
    rounds = rounds_of(Script(acceptance=(0.7,)), SamplingParams(0.5), 1500, 1, "block")
    whole = [one for one in rounds if int(one.blocks.lengths[0]) == 1]
    assert binomtest(sum(one.num_accepted for one in whole), len(whole), 0.49 / 0.58).pvalue > 1e-7


def test_each_depth_of_a_tree_is_reached_as_often_as_the_script_says() -> None:
    """By first letters and their siblings, under the walk. A false alarm has a probability of at most 4e-6."""
    script, num_nodes, depth = Script(acceptance=(0.7, 0.6), recovered=0.5), 12, 4
    target, drafter = ScriptedTarget(script, 4096), ScriptedDrafter(script)
    texts, reached = [list(PROMPT) for _ in range(30)], Counter[int]()
    cached, sequences = [target.cache.open(PROMPT) for _ in texts], [drafter.open(PROMPT, ALONE) for _ in texts]
    for number in range(10):
        keys = [DrawKey(bytes([index] * 16), 0, number) for index in range(len(texts))]
        asked = DraftRequest(
            num_nodes,
            SamplingParams(),
            KEY,
            320,
            True,
            False,
            tree=WantedTree(growth=GrowthPlan.eagle2(num_nodes, depth)),
        )
        judgings = []
        for index, draft in enumerate(drafter.step([Drafting(each, asked) for each in sequences]).drafts):
            assert isinstance(draft, Draft)
            shape = TokenTree.of(draft.parents, len(draft.token_ids))
            assert (len(shape), shape.depth, draft.distributions.encoding) == (num_nodes, depth, Encoding.NONE)
            block = cached[index], texts[index], draft.token_ids, None, SamplingParams(), RULES["coupled"], keys[index]
            judgings.append(judging_of(*block, tree=shape))
        for index, judged in enumerate(judge(target, judgings).outcomes):
            assert isinstance(judged, Judgement)
            reached.update(range(1, len(judged.token_ids)))
            sequences[index].calibrate(len(texts[index]), judged.token_ids)
            texts[index] += judged.token_ids
    expected = survival_of(shape, [script.chances_at(each) for each in range(depth)])
    assert expected[0] == pytest.approx(0.7 + 0.3 * 0.5), "a letter and its capital"
    for tokens, probability in enumerate(expected, 1):
        assert binomtest(reached[tokens], 300, probability).pvalue > 1e-6


def test_tree_takes_a_pass_for_each_depth_and_ends_where_it_is_cut() -> None:
    script = Script(draft_ms=10, draft_row_us=2000, acceptance=(0.5,), recovered=0.9)
    drafter, answers = ScriptedDrafter(script), iter([False, True])
    shape = TokenTree((-1, -1, 0, 0, 1, 2))
    request = DraftRequest(6, SamplingParams(0.0), KEY, 320, tree=WantedTree(shape))
    whole, cut = (replace(request, is_cut=is_cut) for is_cut in (lambda: False, lambda: next(answers)))
    done = drafter.step([Drafting(drafter.open(PROMPT, ALONE), whole)])
    waited(done.draft_s, 3 * 0.010 + 0.002)
    (draft,) = done.drafts
    assert draft is not None
    assert (bytes(draft.token_ids), draft.parents) == (b"fFgGgh", shape.parents)
    assert draft.is_whole
    (draft,) = drafter.step([Drafting(drafter.open(PROMPT, ALONE), cut)]).drafts
    assert draft is not None
    assert (bytes(draft.token_ids), draft.parents) == (b"fFgGg", (-1, -1, 0, 0, 1)), "two of three depths"
    assert not draft.is_whole
    wide = replace(request, tree=WantedTree(TokenTree((-1,) * 14 + (0, 13))), num_tokens=16)
    (draft,) = drafter.step([Drafting(drafter.open(PROMPT, ALONE), wide)]).drafts
    assert draft is not None
    assert bytes(draft.token_ids) == b"fF0123456789g", "it thinks of twelve tokens, and of none after others"
    assert draft.is_whole


def waited(seconds: float, expected_s: float) -> None:
    """The machine may be busy, so that only waiting too little is judged closely."""
    assert expected_s - 1e-3 <= seconds < expected_s + 1.0


def test_step_of_the_target_takes_its_time_and_that_of_every_token() -> None:
    target: SequenceModel = ScriptedTarget(Script(verify_ms=20, read_us=500), 1000)
    readings = [Reading(target.cache.open(), [1] * 30, 1), Reading(target.cache.open(), [1] * 10, 0)]
    started = time.perf_counter()
    assert target.read(readings).shape == (1, 320)
    waited(time.perf_counter() - started, 0.02 + 40 * 500e-6)


def test_step_of_the_drafter_takes_its_time_once_for_all_sessions() -> None:
    drafter = ScriptedDrafter(Script(draft_ms=10, calibration_ms=20, read_us=1000))
    sequences = [drafter.open([1] * count, ALONE) for count in (10, 5, 5)]
    counts = (3, 1, 2)
    draftings = [
        Drafting(sequence, DraftRequest(count, SamplingParams(), KEY, 320))
        for sequence, count in zip(sequences, counts, strict=True)
    ]
    started = time.perf_counter()
    step = drafter.step(draftings)
    waited(time.perf_counter() - started, 0.02 + 20 * 1e-3 + 3 * 0.01)
    waited(step.calibration_s, 0.02 + 20 * 1e-3)
    waited(step.draft_s, 3 * 0.01)
    assert step.num_read == 20


def test_further_blocks_of_a_step_take_their_own_time_if_scripted() -> None:
    drafter = ScriptedDrafter(Script(draft_ms=10, draft_row_us=5000))
    request = DraftRequest(2, SamplingParams(), KEY, 320)
    draftings = [Drafting(drafter.open([1], ALONE), request) for _ in range(3)]
    started = time.perf_counter()
    drafter.step(draftings)
    waited(time.perf_counter() - started, 2 * (0.01 + 2 * 0.005))


def test_rejected_token_is_the_drafters_first_thought_as_often_as_scripted() -> None:
    script = Script(acceptance=(0.5,), recovered=0.25)
    target = ScriptedTarget(script, 1000)
    row = target.read([Reading(target.cache.open(), [1] * 3, 1)])[0].exp()
    request = DraftRequest(1, SamplingParams(), KEY, 320, guesses=WantedGuesses(4))
    drafter = ScriptedDrafter(script)
    sequence = drafter.open([1] * 3, ALONE)
    (draft,) = drafter.step([Drafting(sequence, request)]).drafts
    assert isinstance(draft, Draft)
    assert float(row[draft.token_ids[0]]) == pytest.approx(0.5)
    assert [float(row[token]) for token in draft.guesses[0]] == pytest.approx([0.125, *[0.0375] * 3])
    fork = drafter.fork(sequence, 3, [ord("x")])
    assert fork.num_unread == 1
    (draft,) = drafter.step([Drafting(fork, replace(request, num_tokens=0))]).drafts
    assert isinstance(draft, Draft)
    assert (draft.token_ids, len(draft.guesses[0]), fork.num_unread) == ([], 4, 0)
    assert draft.is_whole
    row = target.read([Reading(target.cache.open(), [1] * 4, 1)])[0].exp()
    assert float(row[draft.guesses[0][0]]) == pytest.approx(0.5), "what it expects comes first"


def test_cut_block_of_the_script_ends_and_the_others_go_on() -> None:
    drafter = ScriptedDrafter(Script(draft_ms=10))
    asked: list[int] = []

    def is_cut() -> bool:
        asked.append(1)
        return len(asked) >= 2

    wanted = [DraftRequest(5, SamplingParams(), KEY, 320, is_cut=is_cut), DraftRequest(3, SamplingParams(), KEY, 320)]
    step = drafter.step([Drafting(drafter.open(PROMPT, ALONE), one) for one in wanted])
    assert [draft.token_ids for draft in step.drafts] == [expected_tokens(len(PROMPT), count) for count in (2, 3)]
    assert [draft.is_whole for draft in step.drafts] == [False, True]
    waited(step.draft_s, 3 * 0.01)
    assert len(asked) == 2, "a block that has ended asks nothing"
    alone = DraftRequest(50, SamplingParams(), KEY, 320, is_cut=lambda: True)
    step = drafter.step([Drafting(drafter.open(PROMPT, ALONE), alone)])
    assert [len(draft.token_ids) for draft in step.drafts] == [1]
    waited(step.draft_s, 0.01)


def test_drafter_reads_in_parts_and_drafts_when_it_has_read_all() -> None:
    drafter = ScriptedDrafter(Script())
    sequence = drafter.open([1] * 10, ALONE)
    wanted = DraftRequest(2, SamplingParams(), KEY, 320)
    for num_read, num_unread in ((4, 6), (4, 2)):
        step = drafter.step([Drafting(sequence, wanted, max_read=4)])
        assert (step.drafts, step.num_read, sequence.num_unread) == ([None], num_read, num_unread)
    step = drafter.step([Drafting(sequence, None, max_read=4)])
    assert (step.drafts, step.num_read, sequence.num_unread) == ([None], 2, 0)
    sequence.calibrate(10, [2, 3])
    assert sequence.num_unread == 2
    assert drafter.step([Drafting(sequence, wanted, max_read=4)]).drafts[0].token_ids == expected_tokens(12, 2)
    sequence.calibrate(12, [])
    assert sequence.num_unread == 1


def test_target_has_a_real_cache_with_room_and_shared_beginnings() -> None:
    target = ScriptedTarget(Script(), 48)
    first = target.cache.open(PROMPT * 7)
    target.read([Reading(first, PROMPT * 7, 1)])
    target.cache.publish(first, PROMPT * 7)
    second = target.cache.open(PROMPT * 7)
    assert second.num_reused == 32
    with pytest.raises(NoRoomError):
        target.read([Reading(second, [1], 1)])
    assert second.length == 32


def test_logits_stand_before_the_draft_tokens_and_after_the_block() -> None:
    target = ScriptedTarget(Script(acceptance=(0.9, 0.25)), 320)
    logits = target.read([Reading(target.cache.open(), [1] * 5, 0), Reading(target.cache.open(), [1] * 8, 3)])
    assert logits.shape == (3, 320)
    probs = logits.softmax(dim=-1)
    for row, (position, accepted) in enumerate(((6, 0.9), (7, 0.25), (8, 0.25))):
        token = expected_tokens(position, 1)[0]
        assert float(probs[row, token]) == pytest.approx(accepted)
        assert float(probs[row, token - 32]) == pytest.approx(1.0 - accepted)
    assert not math.isnan(float(logits.sum()))


@every("setting", [{"dtype": "bfloat16"}, {"device": "cuda:0"}, {"revision": "main"}])
@every(
    "load",
    [
        load_target,
        load_drafter,
    ],
)
def test_setting_that_a_script_would_ignore_is_refused(load: Callable[..., object], setting: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match="scripted"):
        load(ModelSettings("scripted:", **setting), EngineSettings())
    load(ModelSettings("scripted:"), EngineSettings())


def test_layers_that_a_script_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no layers"):
        load_drafter(ModelSettings("scripted:"), layers=LayerParallelSettings(4))


def test_strategy_is_found_by_its_name_or_by_what_the_model_is() -> None:
    for strategy in ("auto", "scripted"):
        assert isinstance(load_drafter(ModelSettings("scripted:"), strategy=strategy).strategy, ScriptedDrafter)
    for strategy, model, said in (
        ("scripted", "models/drafter", "takes a script as its model, not 'models/drafter'"),
        ("model", "scripted:", "scripted:"),
        (
            "clairvoyance",
            "scripted:",
            "unknown strategy 'clairvoyance'; known: auto, suffix, lookup, retrieval, ",
        ),
    ):
        with pytest.raises((InvalidRequestError, OSError), match=said):
            load_drafter(ModelSettings(model), strategy=strategy)
