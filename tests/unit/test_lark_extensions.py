"""What llguidance adds to Lark is found wherever it stands, in time that is linear in the grammar."""

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cases import every

from draftwire.options.structured_output import lark_extensions
from draftwire.options.structured_output.lark_extensions import find_extension
from draftwire.requests.structured_output import MAX_FORM_BYTES


@every(
    "grammar",
    [
        'start: "a" | /b/ -> alias',
        "start: T~3 T~ 2..4\nT: /a/",
        "%import common.WS\n%ignore WS\n%declare X\nstart: [WS] (WS | X)?",
        'start: "%json {}" "<a>" "@b" "[c]:" "::" "&"',
        r'start: "\"<a>" /\/<b>/i',
        "start: /a\n<b>/",
        "start: T // <a> & b\nT: /a/ # %json ]:",
        "start: rule{T}\nrule{x}: x+ [x]\nT.2: /a/",
        'start: ["a"\n | "b"]\n | "c"',
    ],
)
def test_plain_lark_has_none(grammar: str) -> None:
    assert find_extension(grammar) is None


@every(
    ("grammar", "extension"),
    [
        ('start: %json {"a": 1}', "%json"),
        ("start: T\n%if", "%if"),
        ("start: <|eot|>", "<|eot|>"),
        ("start: < |eot|", "< |eot|"),
        ("start: @other", "@other"),
        ("start[lazy]: /a/", "[lazy]:"),
        ("?start[lazy]: /a/", "[lazy]:"),
        ("!?start.1 [lazy]\t: /a/", "[lazy]\t:"),
        ('start[stop="]"]: /a/', '[stop=""]:'),
        ("start: /a/ & /b/", "&"),
        ("start: ~/a/", "~"),
        ('start: "a" ~"3"', "~"),
        ('start: "a" ~"x"3', "~"),
        ("start: one::0x1", "::0x1"),
        ('start: /a\n"/\nother[lazy]: /"/', "[lazy]:"),
        ('start: // "\nother[lazy]: /a/', "[lazy]:"),
        ("start: T # / it's\nother[lazy]: /a/", "[lazy]:"),
    ],
)
def test_extension_is_found(grammar: str, extension: str) -> None:
    assert find_extension(grammar) == extension


def unbounded_repeats(parsed: Any) -> Iterator[Any]:
    """Yields the kinds of the repeats without an upper bound in a parsed expression."""
    match parsed:
        case (re._constants.MAX_REPEAT | re._constants.MIN_REPEAT | re._constants.POSSESSIVE_REPEAT as kind, repeat):
            yield from [kind] * (repeat[1] == re._constants.MAXREPEAT)
    if isinstance(parsed, tuple | list | re._parser.SubPattern):
        for part in parsed:
            yield from unbounded_repeats(part)


@pytest.mark.parametrize("searched", [lark_extensions._HIDDEN, lark_extensions._EXTENSION], ids=["hidden", "extension"])
def test_no_repeat_gives_back_what_it_has_taken(searched: re.Pattern[str]) -> None:
    """So an expression that fails at a place has read what is behind it once for each of its alternatives."""
    kinds = set(unbounded_repeats(re._parser.parse(searched.pattern, searched.flags)))
    assert kinds == {re._constants.POSSESSIVE_REPEAT}


MAX_SECONDS = 0.3
"""CPU time for 64 KiB, which take some ten milliseconds. A search that reads on to the end from each of 16,384 places
takes a second, even in re's fastest loop."""


@every("unit", ["\n", " ", "<", "[", "]", "[ ", "] ", "/", "\\/", '"', '\\"', '"\\', "~ ", "%", "#", "@", "a[", "\t:"])
@pytest.mark.parametrize("start", ["", "/", '"', "start[", "<", "]"])
def test_largest_grammar_is_not_read_again_from_each_of_its_places(unit: str, start: str) -> None:
    grammar = (start + unit * MAX_FORM_BYTES)[:MAX_FORM_BYTES]
    started = time.thread_time()
    find_extension(grammar)
    assert time.thread_time() - started < MAX_SECONDS
