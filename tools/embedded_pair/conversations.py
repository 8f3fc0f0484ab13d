"""Conversations about source code, made of its functions and docstrings, for a model that answers in a chat."""

import ast
import inspect
from collections.abc import Iterable, Iterator

from tools.embedded_pair.corpus import END_OF_TEXT, SourceFile

MAX_CODE_LINES = 40

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ 'System:\\nFunctions:\\n' }}"
    "{% for tool in tools %}{{ tool.function | tojson + '\\n' }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ 'Assistant:\\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    """{{ '\\n<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}"""
    "{{ call.function.arguments | tojson + '}\\n</tool_call>' }}"
    "{% endfor %}{{ eos_token + '\\n' }}"
    "{% elif message['role'] == 'system' %}{{ 'System:\\n' + message['content'] + '\\n' }}"
    "{% else %}{{ 'User:\\n' + message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
)
"""Chat template of transformers: a message is its role, a colon, a line break and its content.

Functions and calls are written too, as models do that were trained for them; the models of this repository were not.
"""


def conversations(files: Iterable[SourceFile]) -> Iterator[str]:
    """Yields conversations about the functions of `files` that have docstrings, as `CHAT_TEMPLATE` writes them.

    Without the text's beginning and its last line break. Files that this Python cannot parse are passed over.
    """
    for file in files:
        try:
            tree = ast.parse(file.text)
        except (SyntaxError, ValueError):
            continue
        module = file.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and not node.name.startswith("test"):
                    yield from _about(module, node, docstring, file.text)


def turn(question: str, answer: str) -> str:
    """Returns a question and its answer, as `CHAT_TEMPLATE` writes them, without the last line break."""
    return f"User:\n{question}\nAssistant:\n{answer}{END_OF_TEXT}"


def _about(module: str, function: ast.FunctionDef | ast.AsyncFunctionDef, docstring: str, text: str) -> Iterator[str]:
    summary = " ".join(docstring.split("\n\n")[0].split())
    lines = (ast.get_source_segment(text, function, padded=True) or "").splitlines()
    code = inspect.cleandoc("\n" + "\n".join(lines)) if len(lines) <= MAX_CODE_LINES else ""
    what = turn(f"What does `{function.name}` in `{module}` do?", summary)
    arguments = [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]
    listed = " and ".join(f"`{argument}`" for argument in arguments) or "no arguments"
    takes = turn(f"What does `{function.name}` take?", f"`{function.name}` takes {listed}.")
    yield f"{what}\n{takes}"
    if code:
        fenced = f"```python\n{code}\n```"
        yield turn(f"Write a function `{function.name}`: {summary}", fenced)
        yield f"{turn(f'Show me `{function.name}` of `{module}`.', fenced)}\n{turn('What does it do?', summary)}"
