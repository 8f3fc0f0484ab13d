"""What can be known before services start is said before, in one line that names the option."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from draftwire.cli import preflight
from draftwire.cli.named_models import EMBEDDED, embedded_model
from draftwire.cli.preflight import check_stack
from draftwire.cli.stack_options import Computing, stack_options
from draftwire.errors import InvalidRequestError
from tests.tiny_models import save_tiny_model

HEAVY = ("torch", "transformers", "openvino")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return Path(shutil.copytree(embedded_model("target"), tmp_path / "target"))


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def fault(target: Path | str, drafter: Path | str = "none") -> str:
    """Returns what is said of a pair."""
    with pytest.raises(InvalidRequestError) as refused:
        check_stack(stack_options(str(target), str(drafter), None))
    said = str(refused.value)
    assert "\n" not in said
    return said


def test_stack_that_can_start_is_not_refused(target: Path) -> None:
    check_stack(stack_options(EMBEDDED, None, 4))
    check_stack(stack_options(str(target), "none", None))
    check_stack(stack_options("scripted:acceptance=0.5", "scripted:acceptance=0.5", None))


def test_values_of_variables_are_checked(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWIRE_VERIFIER_THREADS", "abc")
    assert fault(target).startswith("verifier: Invalid value for '--threads' (env var: 'DRAFTWIRE_VERIFIER_THREADS'): ")
    monkeypatch.setenv("DRAFTWIRE_VERIFIER_THREADS", "1")
    monkeypatch.setenv("DRAFTWIRE_VERIFIER_MAX_SESSIONS", "0")
    assert fault(target) == "max_sessions must be at least 1"


def test_file_that_is_no_model_is_named(target: Path) -> None:
    file = "pyproject.toml"
    assert fault(file) == f"verifier: {file} is a file; a model is a folder, a GGUF file, or a name of the hub"


def test_gpu_that_is_not_there_is_named(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "GPUS", ("no-such-device*",))
    monkeypatch.setenv("DRAFTWIRE_VERIFIER_DEVICE", "cuda:0")
    assert fault(target) == "verifier: device cuda:0 needs a GPU, and this machine has none"
    monkeypatch.setenv("DRAFTWIRE_VERIFIER_DEVICE", "gpu")
    assert fault(target) == "verifier: device gpu is none: cpu, cuda, cuda:0 and so on"
    monkeypatch.setenv("DRAFTWIRE_VERIFIER_DEVICE", "cuda:0")
    monkeypatch.setattr(preflight, "GPUS", ("null",))
    check_stack(stack_options(str(target), "none", None))


def test_folder_without_a_tokenizer_is_named(target: Path) -> None:
    (target / "tokenizer.json").unlink()
    assert fault(target) == f"{target} has no tokenizer: tokenizer.json is missing"
    (target / "tokenizer.model").write_bytes(b"x")
    said = f"{target} has no tokenizer.json, and to make one of tokenizer.model the package sentencepiece is needed"
    assert fault(target) == said


@pytest.mark.parametrize("inner", [False, True])
def test_quantised_checkpoint_is_refused(inner: bool, target: Path) -> None:
    how = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    change(target, **({"text_config": how} if inner else how))
    assert fault(target).startswith(f"{target} is quantised (gptq, 4 bits), and this engine reads dense float weights")


def test_cache_that_cannot_fit_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWIRE_VERIFIER_KV_CACHE_TOKENS", "2000000000")
    said = fault(target)
    assert said.startswith("verifier: kv_cache_tokens 2,000,000,000 take ")
    assert said.endswith("DRAFTWIRE_VERIFIER_KV_CACHE_TOKENS takes fewer, or auto")
    monkeypatch.setenv("DRAFTWIRE_VERIFIER_KV_CACHE_TOKENS", "auto")
    check_stack(stack_options(str(target), "none", None))


def test_draft_model_in_the_verifiers_process_is_checked_as_well(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(drafter: str) -> str:
        options = stack_options(str(target), drafter, None, None, Computing(placement="here"))
        assert list(options) == ["gateway", "verifier"]
        with pytest.raises(InvalidRequestError) as refused:
            check_stack(options)
        return str(refused.value)

    quantised = tmp_path / "quantised"
    shutil.copytree(target, quantised)
    change(quantised, quantization_config={"quant_method": "awq", "bits": 4})
    assert "is quantised (awq" in said(str(quantised))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert said("nobody/no-such-model").startswith(
        "verifier: nobody/no-such-model is no folder, has not been downloaded"
    )


def test_other_vocabulary_is_named_by_its_first_difference(target: Path, tmp_path: Path) -> None:
    drafter = save_tiny_model(tmp_path / "drafter", 7)
    said = fault(target, drafter)
    assert said.startswith("vocabularies differ: target target has 4096 tokens, drafter drafter has 7; the first")


def test_tokens_that_the_configuration_adds_count(target: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(target, tmp_path / "other"))
    for folder, name in ((target, "tokenizer.json"), (other, "tokenizer_config.json")):
        file = folder / name
        values, entry = json.loads(file.read_text()), {"content": "<new>", "special": True}
        if name == "tokenizer.json":
            more = {"id": 4096, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            values["added_tokens"].append(entry | more)
        else:
            values["added_tokens_decoder"] = {"4096": entry}
        file.write_text(json.dumps(values))
    check_stack(stack_options(str(target), str(other), None))
    assert fault(target, embedded_model("drafter")).endswith("is token 4096: '<new>' against None")


def test_hub_that_cannot_be_reached_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = fault("nobody/no-such-model")
    assert said == (
        "verifier: nobody/no-such-model is no folder, has not been downloaded, and huggingface.co cannot be reached"
    )
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    check_stack(stack_options("nobody/no-such-model", "none", None))


def test_checks_need_nothing_that_takes_long_to_import() -> None:
    code = (
        "import sys\nfrom draftwire.cli.stack_options import stack_options\n"
        "from draftwire.cli.preflight import check_stack\ncheck_stack(stack_options('embedded', None, None))\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    started = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
    assert time.monotonic() - started < 20.0, "with other tests beside it; 1 s alone"
