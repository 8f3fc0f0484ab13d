"""Multi-token-prediction layers: targets that hold one, and what is refused, in words. What they compute is compared in
`test_heads`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from draftwire.errors import InvalidRequestError
from draftwire.models.card import load_card
from draftwire.models.configuration import config_of
from draftwire.models.loading import load_lean_model, load_model
from draftwire.models.tokenizer import tokenizer_of
from draftwire.options.heads.draft_head import PairReading
from draftwire.options.heads.head_loading import load_head
from draftwire.options.heads.head_names import HeadKind
from tests.head_checkpoints import MIMO_THETA, Checkpoint, mtp_of_mimo, with_config, with_tensor, without
from tests.tiny_heads import save_tiny_mimo
from tests.tiny_models import save_tiny_model

VOCAB, NUM_LAYERS = 23, 2
TOKENS = [3, 1, 4, 1, 5, 9, 2]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), VOCAB, num_layers=NUM_LAYERS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_config(num_hidden_layers=36), "of a target of 36 layers, and this one has 2"),
        (with_config(hidden_size=32), "reads hidden states of 32"),
        (with_config(num_nextn_predict_layers=3), "has 3 multi-token-prediction layers; heads are made of one"),
        (with_config(use_sliding_window=True), "attention within a window"),
        (with_config(model_type="deepseek_v3"), "layers have latent attention and a mixture of experts, .*: mimo"),
        (with_config(model_type="glm4_moe"), "layers have a mixture of experts, which is not supported"),
        (with_config(model_type="qwen3_next"), "layers have gated attention and a mixture of experts"),
        (with_config(model_type="new_moe"), "of type new_moe, whose .* have a form that is not known here"),
        (without("model.mtp_layers.0.input_proj.weight"), "lacks fc.weight"),
        (without("model.mtp_layers.0.self_attn.q_proj.bias"), "lacks layers.0.self_attn.q_proj.bias"),
        (with_tensor("model.mtp_layers.0.mlp.gate.weight", torch.zeros(1)), "layers.0.mlp.gate.weight, which heads"),
    ],
)
def test_other_multi_token_prediction_layers_are_refused_in_words(
    change: Callable[[Checkpoint], None], words: str, target: Path, tmp_path: Path
) -> None:
    checkpoint = mtp_of_mimo(tmp_path / "head", VOCAB, NUM_LAYERS)
    change(checkpoint)
    with pytest.raises(InvalidRequestError, match=words):
        load_head(checkpoint.write().folder, target, 64)


def test_mimo_is_served_as_qwen2_and_its_layer_drafts_from_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lean loader and by transformers, without the layer's weights; no code of its repository is run, and nobody
    is asked whether it may be.
    """
    folder, network = save_tiny_mimo(tmp_path / "mimo", VOCAB)
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    assert config_of(folder).rope_parameters["rope_theta"] == MIMO_THETA
    token_ids = torch.tensor([TOKENS])
    expected = network(token_ids).logits
    lean, loaded = load_lean_model(str(folder)), load_model(str(folder))
    assert lean is not None
    assert lean.description == loaded.description
    assert isinstance(loaded.model, Qwen2ForCausalLM)
    torch.testing.assert_close(loaded.model(token_ids).logits, expected)
    for name, weight in network.state_dict().items():
        assert torch.equal(lean.model.state_dict()[name], weight)
    head = load_head(folder, folder, 64)
    assert (head.config.kind, head.config.taps) == (HeadKind.MTP, (2,))
    state = head.read([PairReading(head.open(), TOKENS[1:], head.fuse(torch.zeros(6, 16)))])
    assert state.logits.isfinite().all()
    assert load_card(str(folder)).vocabulary == loaded.card.vocabulary
    assert not questions
    assert not (folder / "was-run").exists()


def test_code_of_an_unknown_model_or_tokenizer_is_refused_unasked(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = save_tiny_mimo(tmp_path / "unknown", VOCAB)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"mimo"', '"not_known_anywhere"'))
    monkeypatch.setattr("builtins.input", lambda question="": pytest.fail("nobody is to be asked"))
    for load in (load_model, load_card):
        with pytest.raises(ValueError, match="trust_remote_code"):
            load(str(folder))
    settings = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "modeling_mimo.MiMoForCausalLM"]}}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | own))
    for config in (None, config_of(target)):
        with pytest.raises(ValueError, match="trust_remote_code"):
            tokenizer_of(folder, config)
    assert not (folder / "was-run").exists()


def test_first_token_is_unknown_where_a_text_begins_alone(target: Path, tmp_path: Path) -> None:
    """What begins in the middle of a text knows its first token; beside each other as alone."""
    head = load_head(mtp_of_mimo(tmp_path / "head", VOCAB, NUM_LAYERS).write().folder, target, 256)
    features = head.fuse(torch.randn(6, 16, generator=torch.Generator().manual_seed(1)))

    def reading(first: int, begins_text: bool) -> PairReading:
        return PairReading(head.open(), [first, *TOKENS[2:]], features, begins_text=begins_text)

    def logits(first: int, begins_text: bool) -> torch.Tensor:
        return head.read([reading(first, begins_text)]).logits

    assert torch.equal(logits(1, True), logits(7, True))
    assert not torch.allclose(logits(1, False), logits(7, False))
    together = head.read([reading(1, False), reading(1, True)]).logits
    torch.testing.assert_close(together, torch.cat([logits(1, False), logits(1, True)]))
