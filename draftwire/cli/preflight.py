"""Checks of services that are to be started, as far as their options, the folders of their models and this machine say
what is wrong: without torch, so that it is said in a second.
"""

import os
import re
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import typer

from draftwire.cli.local_stack import arguments_of
from draftwire.cli.named_models import CHAT_MODEL, EMBEDDED
from draftwire.cli.options import SERVICES, build, serve_command
from draftwire.errors import InvalidRequestError
from draftwire.models.description import differing_tokens
from draftwire.models.folder import CONFIG, TOKENIZER_CONFIG, json_of, weights_files
from draftwire.models.model_names import is_gguf, is_scripted
from draftwire.models.quantised import refuse_quantised
from draftwire.options.model_free.names import are_text_drafters
from draftwire.runtime.settings import AUTO, EngineSettings, ModelSettings

OWN_NAMES = (CHAT_MODEL, EMBEDDED)
TOKENIZER = "tokenizer.json"
BY_PACKAGE = {"tokenizer.model": "sentencepiece", "spiece.model": "sentencepiece"}
"""Files of which transformers makes a tokenizer, with a package that is none of its own."""
WITH_MERGES = ("vocab.json", "merges.txt")
"""Files of which it makes one together."""
GPUS = ("nvidia[0-9]*", "dxg", "kfd")
"""Devices of NVIDIA's and AMD's drivers, and of WSL."""
DEVICE = r"(cpu|cuda|hpu|mps|npu|xpu)(:\d+)?"
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
"""Variables of what stands between this machine and the hub, which is then not asked."""
HUB_SECONDS = 1.0
"""Time in which the hub must take a connection."""
ENTRY_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
"""Size of an entry of the cache, at least, by dtype."""


def check_stack(options: Mapping[str, Mapping[str, object]]) -> None:
    """Checks the options of services, by name, before any is started.

    Raises:
        InvalidRequestError: one cannot start; the message names it and the option.
    """
    configs = {name: parsed_config(name, own) for name, own in options.items()}
    models: list[tuple[str, ModelSettings, bool]] = []
    if "verifier" in configs:
        own = configs["verifier"].own_drafts.loading(configs["verifier"].loading)
        models += [("verifier", loading, True) for loading in (configs["verifier"].loading, own) if loading is not None]
    if "drafter" in configs:
        drafter = configs["drafter"]
        models.append(("drafter", drafter.loading, not are_text_drafters(drafter.drafts.strategy)))
    folders = []
    for name, loading, has_weights in models:
        folder = Path(loading.model).expanduser()
        if is_scripted(loading.model):
            continue
        if has_weights:
            check_device(name, loading.device)
        if not folder.exists() and name_on_hub(loading.model):
            check_hub(name, loading.model)
        if folder.is_file() and not is_gguf(loading.model):
            raise InvalidRequestError(
                f"{name}: {folder} is a file; a model is a folder, a GGUF file, or a name of the hub"
            )
        if (folder / CONFIG).is_file():
            check_tokenizer(folder)
            folders.append(folder)
            if has_weights:
                check_weights(name, folder, loading, configs[name].engine)
    if len(folders) == 2:
        check_vocabularies(*folders)


def parsed_config(service: str, options: Mapping[str, object]) -> Any:
    """Returns the configuration that a service makes of its options and variables.

    Raises:
        InvalidRequestError: one is not what it has to be.
    """
    app = typer.Typer(add_completion=False)
    app.command(service)(serve_command(service))
    command = typer.main.get_command(app)
    try:
        values = command.make_context(service, arguments_of(options)).params
    except Exception as error:
        if not hasattr(error, "format_message"):  # which errors of usage have
            raise
        raise InvalidRequestError(f"{service}: {error.format_message()}") from error
    return build(SERVICES[service], values)


def name_on_hub(model: str) -> bool:
    """Whether a model's name is one of the hub, rather than a path."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) is not None and not model.startswith(".")


def check_hub(service: str, model: str) -> None:
    """Checks that a model of the hub has been downloaded, or that the hub answers."""
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, CONFIG), str) or any(name in os.environ for name in PROXIES):
        return
    where = urlsplit(constants.ENDPOINT)
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError
        socket.create_connection((where.hostname, where.port or 443), HUB_SECONDS).close()
    except OSError as error:
        meant = f"; did you mean {model.lower()}?" if model.lower() in OWN_NAMES else ""
        raise InvalidRequestError(
            f"{service}: {model} is no folder, has not been downloaded, and {where.hostname} cannot be reached{meant}"
        ) from error


def check_device(service: str, device: str) -> None:
    """Checks that a device is one of torch's, and that this machine has a GPU, where one is asked for."""
    if re.fullmatch(DEVICE, device) is None:
        raise InvalidRequestError(f"{service}: device {device} is none: cpu, cuda, cuda:0 and so on")
    has_gpu = any(list(Path("/dev").glob(name)) for name in GPUS)
    if device.startswith("cuda") and not has_gpu:
        raise InvalidRequestError(f"{service}: device {device} needs a GPU, and this machine has none")


def check_tokenizer(folder: Path) -> None:
    """Checks that a tokenizer can be made of a model's files."""
    if (folder / TOKENIZER).is_file() or all((folder / name).is_file() for name in WITH_MERGES):
        return
    for name, package in BY_PACKAGE.items():
        if (folder / name).is_file():
            if find_spec(package) is None:
                raise InvalidRequestError(
                    f"{folder} has no {TOKENIZER}, and to make one of {name} the package {package} is needed"
                )
            return
    raise InvalidRequestError(f"{folder} has no tokenizer: {TOKENIZER} is missing")


def check_weights(service: str, folder: Path, loading: ModelSettings, engine: EngineSettings) -> None:
    """Checks that an engine of ours reads a model's weights, and that they and its cache fit into memory."""
    values = json_of(folder / CONFIG)
    if loading.engine == "vllm":
        return
    refuse_quantised(str(folder), values)
    tokens = engine.kv_cache_tokens
    heads, layers = values.get("num_key_value_heads"), values.get("num_hidden_layers")
    head_size = values.get("head_dim") or (values.get("hidden_size") or 0) // (values.get("num_attention_heads") or 1)
    memory = memory_bytes()
    if loading.device != "cpu" or tokens == AUTO or not (heads and layers and head_size and memory):
        return
    cache_bytes = 2 * layers * heads * head_size * ENTRY_BYTES.get(loading.dtype, 2) * tokens
    weights_bytes = sum(file.stat().st_size for file in weights_files(folder))
    if cache_bytes + weights_bytes > memory:
        sizes = f"{cache_bytes / 2**30:.0f} GiB, beside weights of {weights_bytes / 2**30:.0f}"
        raise InvalidRequestError(
            f"{service}: kv_cache_tokens {tokens:,} take {sizes}, and this machine has {memory / 2**30:.0f} GiB: "
            f"DRAFTWIRE_{service.upper()}_KV_CACHE_TOKENS takes fewer, or auto"
        )


def check_vocabularies(target: Path, drafter: Path) -> None:
    """Checks that two models have the same tokens, if both have the file that lists them."""
    if target == drafter or not all((folder / TOKENIZER).is_file() for folder in (target, drafter)):
        return
    from tokenizers import Tokenizer

    vocabularies = []
    for folder in (target, drafter):
        tokens = {number: token for token, number in Tokenizer.from_file(str(folder / TOKENIZER)).get_vocab().items()}
        if (folder / TOKENIZER_CONFIG).is_file():  # transformers adds what is named there alone
            added = json_of(folder / TOKENIZER_CONFIG).get("added_tokens_decoder") or {}
            tokens |= {int(number): str(entry["content"]) for number, entry in added.items()}
        vocabularies.append([tokens[number] for number in sorted(tokens)])
    ours, theirs = vocabularies
    if ours != theirs:
        raise InvalidRequestError(differing_tokens(target.name, drafter.name, ours, theirs))


def memory_bytes() -> int:
    """Returns this machine's memory and swap, bytes; 0 if it does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return 0
    found = cast(list[str], re.findall(r"^(?:MemTotal|SwapTotal):\s+(\d+) kB", text, re.MULTILINE))
    return 1024 * sum(map(int, found))
