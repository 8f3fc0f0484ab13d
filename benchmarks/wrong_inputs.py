"""What a newcomer reads after a mistake: some fifty of them, each with the last line that is printed, and its time.

python -m benchmarks.wrong_inputs --output benchmarks/results/wrong_inputs.json
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import write_report
from draftwire.cli.named_models import EMBEDDED, embedded_model

MAX_SECONDS = 60.0
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"

Change = Callable[[Path], None]


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_text(POINTER)


def _cut_short(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _without(pattern: str) -> Change:
    def change(folder: Path) -> None:
        for file in list(folder.glob(pattern)):
            file.unlink()

    return change


def _unread_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


def _quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))


FOLDERS: dict[str, Change] = {
    "weights are a git-lfs pointer": _pointer,
    "weights are cut short": _cut_short,
    "no tokenizer": _without("tokenizer*"),
    "tokenizer of another package": _unread_tokenizer,
    "no config": _without("config.json"),
    "quantised": _quantised,
    "empty folder": _without("*"),
}
"""What is done to a copy of the target, which `up --target` gets."""

FILES = {
    "settings of no service": ("settings.toml", "threads = 2\n"),
    "broken YAML": ("settings.yaml", "verifier: [1, 2\n"),
}
"""Files of settings, which `up --config` gets."""

EMBEDDED_PAIR = ("--target", EMBEDDED)
COMMANDS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "folder that is not there": (("up", "--target", "models/targt"), {}),
    "no services run": (("generate", "hello", "--address", "127.0.0.1:1"), {}),
    "address of HTTP": (("generate", "hello", "--address", "http://127.0.0.1:8000"), {}),
    "address without a port": (("generate", "hello", "--address", "localhost"), {}),
    "misspelt variable": (("serve", "gateway"), {"DRAFTWIRE_GATEWAY_PROT": "50051"}),
    "number out of range": (("up", *EMBEDDED_PAIR, "--num-speculative-tokens", "99"), {}),
    "no number": (("up", *EMBEDDED_PAIR), {"DRAFTWIRE_VERIFIER_THREADS": "abc"}),
    "no GPU": (("up", *EMBEDDED_PAIR), {"DRAFTWIRE_VERIFIER_DEVICE": "cuda:0"}),
    "cache that does not fit": (("up", *EMBEDDED_PAIR), {"DRAFTWIRE_VERIFIER_KV_CACHE_TOKENS": "2000000000"}),
    "hub without a network": (("up", "--target", "nobody/no-such-model"), {"HF_HUB_OFFLINE": "1"}),
    "file that is no GGUF file": (("up", "--target", "README.md.gguf"), {}),
    "model that was not fetched": (("up", "--target", "smollm2"), {"XDG_CACHE_HOME": "/nowhere"}),
    "no target, and none was fetched": (("up",), {"XDG_CACHE_HOME": "/nowhere"}),
    "drafter without a target": (("up", "--drafter", "models/drafter-8-layers"), {}),
    "file of other settings": (("up", "--config", "pyproject.toml"), {}),
    "file of settings that is none": (("up", "--config", "README.md"), {}),
    "other machines without a key": (("up", *EMBEDDED_PAIR, "--host", "0.0.0.0"), {}),
    "key that is too short": (("up", *EMBEDDED_PAIR, "--api-key", "short"), {}),
    "device that is not there": (("up", *EMBEDDED_PAIR, "--device", "cuda:0"), {}),
    "no threads": (("up", *EMBEDDED_PAIR, "--threads", "0"), {}),
    "engine that is none": (("up", *EMBEDDED_PAIR, "--engine", "llama"), {}),
    "certificate that is not there": (("generate", "hello", "--tls-ca", "/nowhere"), {}),
    "prompts that are not there": (("bench", "--prompts", "/nowhere"), {}),
    "model that nobody packages": (("fetch", "llama"), {}),
    "demo of a folder that is not there": (("demo", "--target", "models/targt"), {}),
    "device that is none": (("up", *EMBEDDED_PAIR, "--device", "gpu"), {}),
    "target that is a file": (("up", "--target", "README.md"), {}),
    "name in other letters": (("up", "--target", "SmolLM2"), {"HF_HUB_OFFLINE": "1"}),
    "host of another machine": (("up", *EMBEDDED_PAIR, "--host", "192.0.2.7", "--api-key", "0123456789"), {}),
    "port that is no number": (("generate", "hello", "--address", "localhost:http"), {}),
    "empty prompt": (("generate", ""), {}),
    "misspelt option": (("up", "--taget", "x"), {}),
    "misspelt command": (("gnerate", "hello"), {}),
    "rule that is none": (("check-rule", "blocks"), {}),
    "certificate without its key": (("serve", "gateway", "--verifier", "127.0.0.1:1", "--tls-cert", "/nowhere"), {}),
    "two prompts": (("generate", "hello", "--prompt-file", "README.md"), {}),
}
"""Arguments and variables."""


@contextmanager
def taken_port() -> Iterator[int]:
    """Yields a port that something else listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def last_line(arguments: tuple[str, ...], variables: dict[str, str]) -> dict[str, Any]:
    """Runs a command that has to fail; returns how it ended."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "draftwire.cli", *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=MAX_SECONDS, check=False, env={**os.environ, **variables}
    )
    lines = ended.stderr.strip().splitlines()
    return {
        "status": ended.returncode,
        "seconds": time.perf_counter() - started,
        "num_lines": len(lines),
        "line": lines[-1] if lines else "",
        "has_traceback": "Traceback" in ended.stderr,
    }


def main() -> None:
    """Runs all, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    free = ("--port", "0", "--http-port", "0")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for mistake, change in FOLDERS.items():
            folder = Path(name) / mistake.replace(" ", "-")
            shutil.copytree(embedded_model("target"), folder)
            change(folder)
            found[mistake] = last_line(("up", "--target", str(folder), *free), {})
        for mistake, (file, text) in FILES.items():
            (Path(name) / file).write_text(text)
            found[mistake] = last_line(("up", "--config", str(Path(name) / file), *free), {})
        for mistake, (said, variables) in COMMANDS.items():
            found[mistake] = last_line((*said, *(free if said[0] == "up" else ())), variables)
        with taken_port() as port:
            found["port that is taken"] = last_line(("up", *EMBEDDED_PAIR, "--port", str(port), "--http-port", "0"), {})
    for mistake, ended in found.items():
        print(f"{mistake:32} {ended['seconds']:5.2f} s  {ended['line']}", file=sys.stderr)
    write_report(arguments, {"mistakes": found})


if __name__ == "__main__":
    main()
