"""What is imported, seen by running it. What the sources say is in test_structure.py."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import draftwire

ROOT = Path(__file__).parents[2]

GRPC = ("grpc", "grpc_health", "grpc_reflection", "draftwire.v1")

SERVICE_DEPENDENCIES = frozenset(
    {
        "fastapi",
        "jinja2",
        "kubernetes",
        "llguidance",
        "numpy",
        "opentelemetry",
        "prometheus_client",
        "pydantic",
        "starlette",
        "structlog",
        "tokenizers",
        "torch",
        "transformers",
        "uvicorn",
    }
)
"""Packages that `pip install draftwire` alone does not bring. grpc itself looks for grpc_health and the like."""


def python(code: str, may_complain: bool = True) -> Any:
    """Runs code in a fresh interpreter and returns what it prints, as JSON."""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert may_complain or not result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_library_imports_without_grpc() -> None:
    left_out = ("client", "cli", "v1", "runtime", "engine")
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "draftwire").rglob("*.py"))
        if path.relative_to(ROOT).parts[1] not in left_out and not path.stem.endswith("_messages")
    ]
    assert {"draftwire.method.rounds", "draftwire.models.loading", "draftwire.training.trainer"} <= set(names)
    code = (
        "import importlib, json, sys\n"
        f"sys.modules.update(dict.fromkeys({GRPC}))\n"
        f"for name in {names}: importlib.import_module(name)\n"
        f"print(json.dumps(sorted(set({names}) & set(sys.modules))))"
    )
    assert python(code) == sorted(names)


def test_clients_and_command_line_work_with_the_package_alone() -> None:
    """What `pip install draftwire` does not bring cannot be imported; the calls go to where nobody listens.

    The command line starts faster without grpc.
    """
    code = f"""
import asyncio, importlib, importlib.abc, json, sys

class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(SERVICE_DEPENDENCIES)}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Without())
importlib.import_module("draftwire.cli.__main__")
import draftwire
said = ["grpc" in sys.modules]

def refused(error):
    said.append(isinstance(error, draftwire.UnavailableError))

form = draftwire.StructuredOutput.json({{"type": "object"}})
with draftwire.Client("127.0.0.1:1") as client:
    try:
        client.generate("a", temperature=0.5, stop=["b"], structured_output=form)
    except draftwire.DraftwireError as error:
        refused(error)

async def ask():
    async with draftwire.AsyncClient("127.0.0.1:1") as client:
        try:
            await client.generate([{{"role": "user", "content": "a"}}], logprobs=1)
        except draftwire.DraftwireError as error:
            refused(error)

asyncio.run(ask())
for name in draftwire.__all__:
    getattr(draftwire, name)
said.append("grpc" in sys.modules)
print(json.dumps([said, sorted({{name.partition('.')[0] for name in sys.modules}})]))
"""
    said, loaded = python(code)
    assert said == [False, True, True, True]
    assert not SERVICE_DEPENDENCIES & set(loaded)


def test_top_package_lists_what_it_has() -> None:
    assert set(draftwire.__all__) <= set(dir(draftwire))
    assert all(getattr(draftwire, name) is not None for name in draftwire.__all__)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = draftwire.nothing_like_it


def test_gateway_runs_without_torch_and_never_imports_it() -> None:
    """Its image has none. A tokenizer travels as it does between verifier and gateway."""
    code = """
import asyncio, json, sys
from draftwire_gateway import launch
from draftwire_gateway.config import GatewayConfig
asyncio.run = lambda coroutine: coroutine.close() or 7
status = launch.serve(GatewayConfig())
import transformers
from draftwire.models.tokenizer import load_tokenizer, tokenizer_files
from transformers import AutoTokenizer
tokenizer = load_tokenizer(tokenizer_files(AutoTokenizer.from_pretrained("models/target")))
text = tokenizer.decode(tokenizer("def f(x):")["input_ids"])
print(json.dumps([status, text, sys.modules["torch"], transformers.is_torch_available()]))
"""
    assert python(code, may_complain=False) == [7, "def f(x):", None, False]


def test_drafter_without_weights_runs_without_torch_and_never_imports_it() -> None:
    code = """
import asyncio, json, sys
from types import SimpleNamespace
from draftwire_drafter import launch
from draftwire_drafter.config import DrafterConfig, DraftSettings
from draftwire.runtime.settings import ModelSettings
asyncio.run = lambda coroutine: coroutine.close() or 7
config = DrafterConfig(ModelSettings("models/target", threads=1), drafts=DraftSettings(strategy="suffix+lookup"))
status = launch.serve(config)
from draftwire.drafting.strategies import load_strategy
from draftwire.drafting.strategy import Drafting, DraftRequest
from draftwire.engine.ranks.place import Place
from draftwire.method.keys import DrawKey
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE
from draftwire_drafter.strategy_context import ConfiguredContext
loaded = load_strategy("suffix+lookup", ConfiguredContext(config, SimpleNamespace(place=Place())))
request = DraftRequest(2, SamplingParams(), DrawKey(bytes(16), 0, 0), 4096)
(draft,) = loaded.strategy.step([Drafting(loaded.strategy.open([5, 6, 7, 8, 5, 6], ALONE), request)]).drafts
print(json.dumps([status, draft.token_ids, loaded.card.description.vocab_size, sys.modules["torch"]]))
"""
    assert python(code, may_complain=False) == [7, [7, 8], 4096, None]


def test_verifier_without_options_loads_none_of_them() -> None:
    """After a few rounds of its own core, as a user starts it. Text drafters are on by default."""
    code = """
import asyncio, json, sys
sys.path.append("tests/unit")
from session_specs import target_spec
import draftwire_verifier.server
from draftwire.method.rounds import Verdict
from draftwire.runtime.settings import ModelSettings
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.core import VerifierCore

async def serve():
    core = VerifierCore(VerifierConfig(ModelSettings("models/target", threads=1)))
    await core.start()
    lease_id, outbox = core.open_lease()
    running = asyncio.create_task(core.run_steps())
    core.open_session(target_spec(token_ids=[1, 2, 3], plain_rounds=3), lease_id)
    verdicts = []
    while len(verdicts) < 3:
        verdicts += [event for event in await outbox.take_all() if isinstance(event, Verdict)]
    running.cancel()

asyncio.run(serve())
print(json.dumps(sorted(sys.modules)))
"""
    loaded = python(code)
    assert "draftwire.options.ahead.held_blocks" in loaded, "what is loaded is seen"
    parts = (".heads.", ".trees.", ".tree_rule", ".walk", "_verifier.vllm", "feature_feeds", "layer_parallel", "vllm")
    of_the_edge = (".features", ".feature_format", ".feature_messages")  # whoever sends them, they are read
    found = [name for name in loaded if any(part in name for part in parts)]
    assert [name for name in found if not name.endswith(of_the_edge)] == []


def test_configuration_and_weights_are_read_without_torchs_compiler() -> None:
    """Nor its distributed tensors: 900 modules, which take a second of each process."""
    code = f"""
import json, sys, torch
from draftwire.models.loading import load_lean_model
from transformers.utils import is_torch_available
load_lean_model({str(ROOT / "models" / "target")!r}, "float32")
heavy = ("sympy", "torch._dynamo", "torch.distributed.tensor", "transformers.activations")
print(json.dumps([is_torch_available(), [name for name in heavy if name in sys.modules]]))
"""
    assert python(code) == [True, []]
