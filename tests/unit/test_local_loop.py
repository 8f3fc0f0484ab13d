"""The loop in one process: what the rule sees is the target's, round after round."""

import copy
import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from enumeration import largest_deviation
from tiny_models import save_tiny_model, tiny_network, with_exact_norms
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftwire.distributions import DenseRows, SparseRows, quantize, race
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.encoding import TOTAL_WEIGHT
from draftwire.errors import InvalidRequestError
from draftwire.keys import Role, derive_key
from draftwire.local_loop import LocalRun, speculate
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoder import decoder_of
from draftwire.parameters import SamplingParams
from draftwire.quantization import Encoding, Quantization
from draftwire.randomness import DrawKey, exponentials
from draftwire.sampling import Span, probabilities_of_spans
from draftwire.verification import RULES, GreedyBlockRule, LawRule
from draftwire.verification.target import Judging, judge

PROMPT = [1, 3, 0, 2, 2]
VOCAB_SIZE = 5


torch.set_num_threads(1)


@dataclass
class Pair:
    """Two models under test, and copies that keep transformers' own attention."""

    target: CachedModel
    strategy: LanguageModelDrafter
    target_reference: PreTrainedModel
    drafter_reference: PreTrainedModel


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(save_tiny_model(folder / str(seed), VOCAB_SIZE, seed), dtype=torch.float32)
        for seed in (0, 2)
    )
    references = copy.deepcopy(target), copy.deepcopy(drafter)
    strategy = LanguageModelDrafter(CachedModel(decoder_of(drafter), 64), context_length=64)
    return Pair(CachedModel(decoder_of(target), 64), strategy, *references)


STOP_TOKENS = frozenset({1, 4})
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(0.7, top_k=3, top_p=0.9),
    SamplingParams(0.0),
    SamplingParams(1.1, min_p=0.05, repetition_penalty=1.6, presence_penalty=0.8, frequency_penalty=0.3),
    SamplingParams(1.5, logit_bias=((0, 2.0), (3, -1.0)), allowed_token_ids=(0, 1, 3, 4), min_tokens=15),
]


def rows_of(model: PreTrainedModel, text: list[int], first: int, sampling: SamplingParams) -> Tensor:
    """Returns the laws after `text[:first]`, `text[:first + 1]` and so on, each computed by itself."""
    logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    rows = [
        probabilities_of_spans(logits[end - 1 : end].clone(), [Span(sampling, 1, text[:end], len(PROMPT), STOP_TOKENS)])
        for end in range(first, len(text) + 1)
    ]
    return torch.cat(rows)


@torch.inference_mode()
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block_length", [0, 1, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("encoding", [Encoding.DENSE_FLOAT32, Encoding.SPARSE_UINT16])
def test_rule_sees_the_targets_and_the_drafters_own_rows_at_every_position(
    pair: Pair, rule: str, block_length: int, sampling: SamplingParams, encoding: Encoding
) -> None:
    """Together with the enumeration of the rules this proves the law of the output: caches and indices are right.

    Where nothing is told about the drafter's rows, its tokens are compared with the race that they won.
    """
    target, drafter = pair.target_reference, pair.drafter_reference
    committed = list(PROMPT)
    lengths = set()
    words = torch.tensor([DrawKey(derive_key(9, Role.COUPLING), 0, 0).text_words])
    run = LocalRun(sampling, 25, block_length, rule, 9, STOP_TOKENS)
    quantization = Quantization(encoding, mass=0.9)
    strategy = LanguageModelDrafter(pair.strategy.model, pair.strategy.context_length, quantization=quantization)
    for judgement in speculate(pair.target, strategy, PROMPT, run):
        blocks = judgement.blocks
        tokens = blocks.draft_tokens[0].tolist()
        assert len(tokens) == min(block_length, len(PROMPT) + 25 - len(committed) - 1)
        text = committed + tokens
        expected_target = rows_of(target, text, len(committed), sampling)
        assert (blocks.padded_target_probs()[0] - expected_target).abs().max() < 1e-5
        if tokens:
            expected_draft = rows_of(drafter, text, len(committed), sampling)[:-1]
            if RULES[rule].needs_draft_probs and encoding is Encoding.DENSE_FLOAT32:
                assert (blocks.padded_draft_probs()[0] - expected_draft).abs().max() < 1e-5
            elif RULES[rule].needs_draft_probs:
                quantized = quantize(expected_draft, quantization)
                probs = quantized.weights.float() / TOTAL_WEIGHT
                rounded = SparseRows(quantized.token_ids, probs, VOCAB_SIZE).dense()
                # Rounding in the network moves a weight by one here and there, and the likeliest token's by as many.
                assert (blocks.padded_draft_probs()[0] - rounded).abs().max() < 1e-4
            if RULES[rule].is_coupled:
                places = torch.arange(len(committed), len(text))
                times = exponentials(words.expand(len(tokens), -1), places, VOCAB_SIZE)
                assert race(expected_draft, times).winners.tolist() == tokens
        assert judgement.token_ids[:-1] == tokens[: judgement.num_accepted]
        lengths.add(judgement.num_accepted)
        committed += judgement.token_ids
    assert len(committed) == len(PROMPT) + 25
    if block_length == 4 and sampling.temperature == 1.0:
        assert len(lengths) >= 3, "blocks were accepted in full, in part and not at all"


@torch.inference_mode()
@pytest.mark.parametrize("rule", [*RULES, GreedyBlockRule.name])
def test_greedy_text_is_the_targets_own(pair: Pair, rule: str) -> None:
    run = LocalRun(SamplingParams(0.0), 40, 4, rule, 0)
    rounds = speculate(pair.target, pair.strategy, PROMPT, run)
    ids = [token for judgement in rounds for token in judgement.token_ids][:40]
    expected = pair.target_reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    assert ids == expected[0, len(PROMPT) :].tolist()


def text(pair: Pair, seed: int, prompt: list[int] = PROMPT, rule: str = "block") -> list[int]:
    rounds = speculate(pair.target, pair.strategy, prompt, LocalRun(SamplingParams(), 18, 4, rule, seed))
    return [token for judgement in rounds for token in judgement.token_ids]


@pytest.mark.parametrize("rule", [*RULES, GreedyBlockRule.name])
def test_same_seed_gives_the_same_text_and_another_seed_another(pair: Pair, rule: str) -> None:
    assert text(pair, 1, rule=rule) == text(pair, 1, rule=rule)
    assert text(pair, 1, rule=rule) != text(pair, 2, rule=rule)


def test_unknown_rule_is_refused_before_anything_is_opened(pair: Pair) -> None:
    with pytest.raises(InvalidRequestError, match="rejection_sample_method"):
        text(pair, 1, rule="greedy")
    assert pair.target.cache.sequences == set()


def test_prompt_that_was_read_before_gives_the_same_text(pair: Pair) -> None:
    prompt = [number % VOCAB_SIZE for number in range(33)]
    sequence = pair.target.cache.open(prompt)
    pair.target.cache.close(sequence)
    assert sequence.num_reused == 0
    first = text(pair, 1, prompt)
    sequence = pair.target.cache.open(prompt)
    pair.target.cache.close(sequence)
    assert sequence.num_reused == 32
    assert text(pair, 1, prompt) == first


def test_finished_and_abandoned_runs_give_their_room_back(pair: Pair) -> None:
    text(pair, 1)
    rounds = speculate(pair.target, pair.strategy, PROMPT, LocalRun(SamplingParams(), 30, 4, "block", 1))
    next(rounds)
    caches = (pair.target.cache, pair.strategy.model.cache)
    assert all(len(cache.sequences) == 1 for cache in caches)
    rounds.close()
    for cache in caches:
        assert cache.sequences == set()
        assert cache.num_free_blocks == cache.num_blocks
        cache.check_integrity()


# The law of texts whose logits depend on the text

SMALL_VOCAB, SMALL_PROMPT, SMALL_STOPS, SMALL_LENGTH = 3, [0, 2], frozenset({2}), 4
TEXTUAL = {
    "repetition": SamplingParams(1.2, repetition_penalty=1.7),
    "presence": SamplingParams(0.9, presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=1.2),
    "min_tokens": SamplingParams(min_tokens=2),
    "min_tokens in a later round": SamplingParams(min_tokens=3),
    "bias": SamplingParams(logit_bias=((1, 1.3), (2, -0.4))),
    "all of them": SamplingParams(
        0.8,
        repetition_penalty=1.4,
        presence_penalty=0.7,
        frequency_penalty=-0.6,
        min_tokens=2,
        logit_bias=((0, -0.9),),
    ),
}


def by_hand(logits: list[float], params: SamplingParams, generated: tuple[int, ...]) -> list[float]:
    """Returns the law of the next token, token by token: bias, stop tokens, penalties, temperature."""
    weights = []
    for token, logit in enumerate(logits):
        value = logit + dict(params.logit_bias).get(token, 0.0)
        if token in (*SMALL_PROMPT, *generated):
            value = value / params.repetition_penalty if value > 0.0 else value * params.repetition_penalty
        if token in generated:
            value -= params.presence_penalty + params.frequency_penalty * generated.count(token)
        masked = token in SMALL_STOPS and len(generated) < params.min_tokens
        weights.append(0.0 if masked else math.exp(value / params.temperature))
    return [weight / sum(weights) for weight in weights]


@torch.inference_mode()
def plain_law(reference: PreTrainedModel, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Returns the law of texts that are decoded token by token."""
    law = {(): 1.0}
    for _ in range(SMALL_LENGTH):
        texts = torch.tensor([[*SMALL_PROMPT, *text] for text in law])
        logits = reference(input_ids=texts, use_cache=False).logits[:, -1].tolist()
        law = {
            (*text, token): mass * prob
            for (text, mass), row in zip(law.items(), logits, strict=True)
            for token, prob in enumerate(by_hand(row, params, text))
        }
    return law


def blocked_law(
    model: CachedModel, rule: LawRule, params: SamplingParams, block_length: int, has_span: bool = True
) -> dict[tuple[int, ...], float]:
    """Returns the law of texts that are decoded in rounds of `judge`, every block of which is tried.

    The drafter knows two laws, after an even and after an odd last token, and nothing of the parameters.
    """
    tables = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]])  # float32 numbers that sum to 1 exactly
    finished: dict[tuple[int, ...], float] = defaultdict(float)
    growing = {(): 1.0}
    while growing:
        following: dict[tuple[int, ...], float] = defaultdict(float)
        tries = list(product(growing, product(range(SMALL_VOCAB), repeat=block_length)))
        judgings, drawn = [], []
        for text, tokens in tries:
            committed = [*SMALL_PROMPT, *text]
            rows = tables[torch.tensor([token % 2 for token in [*committed, *tokens][len(committed) - 1 : -1]])]
            drawn.append(float(rows.gather(1, torch.tensor([tokens]).T).double().prod()))
            judgings.append(
                Judging(
                    model.cache.open(committed),
                    committed,
                    list(tokens),
                    DenseRows(rows),
                    params,
                    rule,
                    DrawKey(bytes(16), 0, 0),
                    prompt_len=len(SMALL_PROMPT) if has_span else len(committed),
                    stop_token_ids=SMALL_STOPS,
                )
            )
        (decided,) = judge(model, judgings).decided
        for judging in judgings:
            model.cache.close(judging.sequence)
        assert decided.members == list(range(len(tries)))
        law = rule.stop_law(decided.blocks)
        for accepted in range(block_length + 1):
            weights = rule.extra_weights(decided.blocks, law, torch.full((len(tries),), accepted))
            outcomes = law.accepted_probs[:, accepted, None] * weights / weights.sum(dim=1, keepdim=True)
            for (text, tokens), prob, row in zip(tries, drawn, outcomes.tolist(), strict=True):
                for extra in range(SMALL_VOCAB):
                    emitted = (*text, *tokens[:accepted], extra)
                    done = len(emitted) >= SMALL_LENGTH
                    mass = growing[text] * prob * row[extra]
                    if mass > 0.0:
                        (finished if done else following)[emitted[:SMALL_LENGTH]] += mass
        growing = following
    return finished


@pytest.fixture(scope="module")
def small() -> tuple[CachedModel, PreTrainedModel]:
    network = tiny_network("llama", SMALL_VOCAB, 32, seed=8)
    reference = with_exact_norms(copy.deepcopy(network))
    return CachedModel(decoder_of(network, "lean"), 16 * 700), reference


@pytest.mark.parametrize("params", TEXTUAL.values(), ids=TEXTUAL.keys())
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("block_length", [1, 3])
def test_blocks_have_the_law_of_plain_decoding_where_logits_depend_on_the_text(
    small: tuple[CachedModel, PreTrainedModel], params: SamplingParams, rule: str, block_length: int
) -> None:
    """By enumeration of all blocks of all rounds through `judge`, in float64."""
    model, reference = small
    chosen = RULES[rule]
    assert isinstance(chosen, LawRule)
    law, expected = blocked_law(model, chosen, params, block_length), plain_law(reference, params)
    assert largest_deviation(law, expected) < 1e-10
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    if params.min_tokens:
        early = [text for text in law if SMALL_STOPS & set(text[: params.min_tokens])]
        assert not early
        assert any(mass > 1e-3 and 2 in text for text, mass in law.items())


@pytest.mark.parametrize("name", ["presence", "frequency", "min_tokens"])
def test_enumeration_sees_a_prompt_that_is_taken_for_generated_text_or_the_other_way_round(
    small: tuple[CachedModel, PreTrainedModel], name: str
) -> None:
    model, reference = small
    rule = RULES["block"]
    assert isinstance(rule, LawRule)
    law = blocked_law(model, rule, TEXTUAL[name], 3, has_span=False)
    assert largest_deviation(law, plain_law(reference, TEXTUAL[name])) > 1e-3
