"""llama.cpp: its server, with weights in Q8_0. Needs gguf, sentencepiece, torch and transformers, and llama.cpp, built,
in the folder that the variable LLAMA_CPP names.

A model is converted when it is first used, beside its weights.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from protocol import Task, answer_tasks, parse_options

CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1]]
from conversion.base import TextModel
known = TextModel.get_vocab_base_pre
def base(self, tokenizer):
    try: return known(self, tokenizer)
    except NotImplementedError: return "gpt-2"  # prompts are given as ids
TextModel.get_vocab_base_pre = base
sys.argv = [sys.argv[1] + "/convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
START_SECONDS = 60.0


def load() -> Callable[[Task], list[list[int]]]:
    """Returns the server as a function."""
    options = parse_options(__doc__)
    home = Path(os.environ["LLAMA_CPP"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "--model": converted(home, options.target),
        "--threads": options.threads,
        "--threads-batch": options.threads,
        "--ctx-size": options.cache_tokens,
        "--parallel": options.max_sessions,
        "--port": port,
    }
    command = [str(home / "build" / "bin" / "llama-server"), *(str(part) for pair in settings.items() for part in pair)]
    server = subprocess.Popen([*command, "--no-webui"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(server.kill)
    address = f"http://127.0.0.1:{port}"
    _wait(server, f"{address}/health")
    pool = ThreadPoolExecutor(options.max_sessions)

    def complete(prompt: list[int], task: Task, number: int) -> list[int]:
        request = {
            "prompt": prompt,
            "n_predict": task["num_tokens"],
            "temperature": task["temperature"],
            "samplers": ["temperature"],
            "seed": task["seed"] + number,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        return list(_answer(f"{address}/completion", request)["tokens"])

    def generate(task: Task) -> list[list[int]]:
        numbers = range(len(task["prompts"]))
        return list(pool.map(complete, task["prompts"], [task] * len(numbers), numbers))

    return generate


def converted(home: Path, folder: str) -> str:
    """Returns the file of a model in llama.cpp's format."""
    result = Path(folder) / "q8_0.gguf"
    if not result.exists():
        options = [folder, "--outtype", "q8_0", "--outfile", str(result)]
        subprocess.run([sys.executable, "-c", CONVERT, str(home), *options], check=True)
    return str(result)


def _answer(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600.0) as response:
        return json.load(response)


def _wait(server: "subprocess.Popen[bytes]", url: str) -> None:
    """Waits until the server has loaded the model."""
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            _answer(url)
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > until:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    answer_tasks(load)
