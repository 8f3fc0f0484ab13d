"""Guesses as a drafter's strategy: what it loads, reads and proposes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strategy_loading import load_drafter

from draftwire.drafting.strategy import Draft, Drafting, DraftingStrategy, DraftRequest, DraftSequence
from draftwire.errors import InvalidRequestError
from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.method.quantization import Encoding
from draftwire.models.loading import load_model
from draftwire.options.layer_parallel.layer_settings import LayerParallelSettings
from draftwire.options.model_free.cascade_drafter import CascadeDrafter
from draftwire.options.model_free.store_building import build_store
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE
from draftwire.runtime.settings import EngineSettings, ModelSettings, TextDraftSettings
from tests.tiny_models import save_tiny_model

VOCAB_SIZE = 20
REPEATING = [1, 2, 3, 4, 1, 2]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), VOCAB_SIZE, seed=1, context_length=64, stop_token_id=5)


@pytest.fixture(scope="module")
def suffix(target: Path) -> DraftingStrategy:
    return load_drafter(ModelSettings(str(target), threads=1), strategy="suffix").strategy


def draft(strategy: DraftingStrategy, sequence: DraftSequence, num_tokens: int = 3, **changes: object) -> Draft:
    fields: dict[str, Any] = {
        "sampling": SamplingParams(),
        "key": DrawKey(bytes(KEY_BYTES), 0, 0),
        "vocab_size": VOCAB_SIZE,
        **changes,
    }
    (made,) = strategy.step([Drafting(sequence, DraftRequest(num_tokens, **fields))]).drafts
    assert isinstance(made, Draft)
    return made


@pytest.mark.parametrize("strategy", ["suffix", "lookup"])
def test_card_is_the_targets_but_for_weights(target: Path, strategy: str) -> None:
    engine = EngineSettings(kv_cache_tokens=48)
    card = load_drafter(ModelSettings(str(target), threads=1), engine, strategy=strategy).card.description
    whole = load_model(str(target)).description
    assert (card.name, card.dtype, card.context_length) == (strategy, "none", 48)
    for name in ("vocabulary_fingerprint", "vocab_size", "stop_token_ids"):
        assert getattr(card, name) == getattr(whole, name), name
    assert card.weights_fingerprint == b""


def test_no_file_of_weights_is_needed(target: Path, tmp_path: Path) -> None:
    for file in target.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert load_drafter(ModelSettings(str(tmp_path), threads=1), strategy="suffix").card.description.vocab_size == 20


def stored(target: Path, folder: Path) -> TextDraftSettings:
    """Returns settings with a store in which 7, 8, 9 go on with 4, 4, 4."""
    description = load_model(str(target)).description
    build_store(folder, [np.array([7, 8, 9, 4, 4, 4])], description.vocabulary_fingerprint, description.vocab_size)
    return TextDraftSettings(retrieval_store=folder)


def test_drafter_retrieves_from_its_store_alone_or_beside_the_text(target: Path, tmp_path: Path) -> None:
    texts, loading = stored(target, tmp_path / "store"), ModelSettings(str(target), threads=1)
    retrieving = load_drafter(loading, strategy="retrieval", texts=texts).strategy
    assert draft(retrieving, retrieving.open([1, 7, 8, 9], ALONE)).token_ids == [4, 4, 4]
    joined = load_drafter(loading, strategy="suffix+retrieval", texts=texts).strategy
    assert draft(joined, joined.open([7, 8, 9, 1, 7, 8, 9], ALONE)).token_ids[0] == 1, "of equal matches the text's own"
    assert draft(joined, joined.open([8, 9, 1, 7, 8, 9], ALONE)).token_ids == [4, 4, 4], "the longer one"


def test_store_is_needed_and_the_targets(target: Path, tmp_path: Path) -> None:
    loading = ModelSettings(str(target), threads=1)
    with pytest.raises(InvalidRequestError, match="retrieval needs a store: set retrieval_store"):
        load_drafter(loading, strategy="retrieval")
    with pytest.raises(InvalidRequestError, match=f"no retrieval store at {tmp_path}"):
        load_drafter(loading, strategy="retrieval", texts=TextDraftSettings(retrieval_store=tmp_path))
    texts = stored(target, tmp_path / "store")
    with pytest.raises(InvalidRequestError, match="takes no retrieval_store: add retrieval"):
        load_drafter(ModelSettings("scripted:"), texts=texts)
    with pytest.raises(InvalidRequestError, match="takes no shared_tokens: add suffix"):
        load_drafter(loading, strategy="model", texts=TextDraftSettings(shared_tokens=5))
    with pytest.raises(InvalidRequestError, match="takes no retrieval_store: add retrieval"):
        load_drafter(loading, strategy="suffix", texts=texts)
    with pytest.raises(InvalidRequestError, match="takes no shared_tokens: add suffix"):
        load_drafter(loading, strategy="lookup", texts=TextDraftSettings(shared_tokens=5))


def test_model_is_joined_with_what_continues_its_tokens(target: Path) -> None:
    loaded = load_drafter(ModelSettings(str(target), threads=1), strategy="model+suffix")
    assert isinstance(loaded.strategy, CascadeDrafter)
    plain = load_drafter(ModelSettings(str(target), threads=1)).card.description
    assert loaded.card.description == replace(plain, name=f"{plain.name}+suffix")
    with pytest.raises(InvalidRequestError, match=r"unknown strategy 'model\+x'"):
        load_drafter(ModelSettings(str(target), threads=1), strategy="model+x")


def test_settings_of_weights_are_refused(target: Path) -> None:
    with pytest.raises(InvalidRequestError, match="strategy suffix has no"):
        load_drafter(ModelSettings(str(target), dtype="float16"), strategy="suffix")
    with pytest.raises(InvalidRequestError, match="strategy lookup has no layers"):
        load_drafter(ModelSettings(str(target)), layers=LayerParallelSettings(layer_parallel_size=2), strategy="lookup")


def test_guess_is_stated_as_one_hot_and_not_at_all_where_no_rule_reads_it(suffix: DraftingStrategy) -> None:
    sequence = suffix.open(REPEATING, ALONE)
    made = draft(suffix, sequence)
    assert made.token_ids == [3, 4, 1]
    assert (made.distributions.encoding, made.distributions.vocab_size) == (Encoding.ONE_HOT, VOCAB_SIZE)
    assert draft(suffix, sequence, needs_probs=False).distributions.encoding is Encoding.NONE


def test_block_is_never_empty_nor_beyond_a_vocabulary(suffix: DraftingStrategy) -> None:
    assert draft(suffix, suffix.open([7, 8, 9], ALONE)).token_ids == [9], (
        "nothing is known: a block has one token at least"
    )
    assert draft(suffix, suffix.open([7, 15, 8, 7], ALONE), vocab_size=10).token_ids == [7]
    assert draft(suffix, suffix.open([1, 15, 3, 1, 15], ALONE), vocab_size=10).token_ids == [3, 1]


def test_masked_tokens_end_a_guess(suffix: DraftingStrategy) -> None:
    sequence = suffix.open([1, 2, 3, 5, 1, 2], ALONE)
    barred = {"sampling": SamplingParams(min_tokens=3), "stop_token_ids": frozenset({5}), "prompt_len": 6}
    assert draft(suffix, sequence, **barred).token_ids == [3]
    assert draft(suffix, sequence, sampling=SamplingParams(allowed_token_ids=frozenset({3}))).token_ids == [3]


def test_committed_tokens_are_read_in_parts_and_drafted_ones_never(suffix: DraftingStrategy) -> None:
    sequence = suffix.open(REPEATING, ALONE)
    request = DraftRequest(2, SamplingParams(), DrawKey(bytes(KEY_BYTES), 0, 0), VOCAB_SIZE)
    done = suffix.step([Drafting(sequence, request, max_read=4)])
    assert (done.drafts, done.num_read, sequence.num_unread) == ([None], 4, 2)
    done = suffix.step([Drafting(sequence, request, max_read=4)])
    assert (done.num_read, sequence.num_unread) == (2, 0)
    sequence.calibrate(6, [3, 4])
    assert sequence.num_unread == 2
    assert draft(suffix, sequence).token_ids == [1, 2, 3]
    sequence.calibrate(6, [9, 1, 2])
    assert draft(suffix, sequence).token_ids[0] in (3, 9), "what was taken back is not in the text any more"
    sequence.calibrate(2, [3])
    assert draft(suffix, sequence).token_ids == [3]
