"""A verifier of two processes with a head, which rank 0 alone has: the texts of one process, drafted by it."""

from pathlib import Path
from typing import Any

from observing import read_metric

from draftwire.cli.local_stack import LocalStack
from draftwire.client import Client
from tests.breakable_group import COMMON, PROMPT
from tests.tiny_heads import EAGLE3, save_tiny_head


def greedy_texts(target: Path, head: Path, **verifier: Any) -> list[list[int]]:
    """Returns greedy texts, most of whose rounds the head has drafted."""
    options: dict[str, dict[str, object]] = {
        "verifier": {**COMMON, "model": target, "draft_head": head, **verifier},
        "gateway": {"drafter": "none", "speculation": "fixed"},
    }
    with LocalStack(options) as stack, Client(stack.address) as client:
        given: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, "num_speculative_tokens": 3}
        texts = [client.generate([*PROMPT, first], **given).token_ids for first in range(3)]
        assert read_metric(stack, "verifier", "local_draft_tokens", f'strategy="{EAGLE3}"') > 30
        assert read_metric(stack, "verifier", "local_accepted_tokens", f'strategy="{EAGLE3}"') > 0
    return texts


def test_texts_are_those_of_one_process(pair: tuple[Path, Path], tmp_path: Path) -> None:
    head = save_tiny_head(tmp_path / "head", pair[0])
    alone = greedy_texts(pair[0], head)
    assert greedy_texts(pair[0], head, tensor_parallel_size=2) == alone
    assert greedy_texts(pair[0], head, decoder="transformers") == alone
