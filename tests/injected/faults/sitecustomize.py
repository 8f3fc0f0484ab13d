"""Makes services fail with errors that quote prompts. Python loads this file in processes whose path has its folder.

A prompt with `fault:tokenize`, `fault:spec`, `fault:task`, `fault:verify` or `fault:draft` in it fails at that place.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any


def text_of(what: Any) -> str:
    """Returns a prompt as text; the scripted tokenizer has one token for each byte."""
    return what if isinstance(what, str) else bytes(token % 256 for token in what).decode(errors="replace")


def fail_on(owner: Any, name: str, fault: str, prompts: Callable[..., Any]) -> None:
    """Makes a function raise an error that quotes the prompt, if the prompt asks for it."""
    original = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        for prompt in prompts(*args, **kwargs):
            text = text_of(prompt)
            if fault in text:
                raise ValueError(f"cannot deal with {text!r}: {list(prompt)}")
        return original(*args, **kwargs)

    setattr(owner, name, failing)


async def fail_later(text: str) -> None:
    """An error that nobody waits for."""
    raise ValueError(text)


def spoil_gateway() -> None:
    """Faults of a gateway, and a chat template that refuses every message by quoting it."""
    from draftwire.runtime import messages
    from draftwire_gateway import core

    fail_on(core.GatewayCore, "tokenize", "fault:tokenize", lambda _core, text, *_: [text])
    fail_on(messages, "draft_spec_to_proto", "fault:spec", lambda spec, *_: [spec.token_ids])
    tokenize, load_tokenizer = core.GatewayCore.tokenize, core.load_tokenizer

    async def tokenize_and_fail_later(self: Any, text: str, caller: str = "") -> list[int]:
        if "fault:task" in text:
            asyncio.get_running_loop().create_task(fail_later(text))
        return await tokenize(self, text, caller)

    def load_with_template(files: dict[str, bytes]) -> Any:
        tokenizer = load_tokenizer(files)
        tokenizer.chat_template = "{{ raise_exception(messages[0].content) }}"
        return tokenizer

    core.GatewayCore.tokenize = tokenize_and_fail_later  # type: ignore[method-assign]
    core.load_tokenizer = load_with_template


command = Path("/proc/self/cmdline").read_text().replace("\0", " ")
if "serve gateway" in command:
    spoil_gateway()
elif "serve verifier" in command:
    from draftwire.models.scripted import ScriptedTarget

    fail_on(ScriptedTarget, "read", "fault:verify", lambda _self, readings: [one.token_ids for one in readings])
elif "serve drafter" in command:
    from draftwire.options.scripted.scripted_drafter import ScriptedDrafter

    fail_on(ScriptedDrafter, "open", "fault:draft", lambda _self, token_ids, *_args, **_named: [token_ids])
