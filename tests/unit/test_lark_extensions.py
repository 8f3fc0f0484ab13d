"""What llguidance adds to Lark is found wherever it stands, in time that is linear in the grammar."""

import time

import pytest
from cases import every

from draftwire.requests.lark_extensions import find_extension


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


def seconds_for(grammar: str) -> float:
    """Returns the least of several times, which other processes disturb least."""
    times = []
    for _ in range(5):
        started = time.thread_time()
        find_extension(grammar)
        times.append(time.thread_time() - started)
    return min(times)


@every("unit", ["\n", " ", "<", "[", "]", "[ ", "] ", "/", "\\/", '"', '\\"', '"\\', "~ ", "%", "#", "@", "a[", "\t:"])
@pytest.mark.parametrize("start", ["", "/", '"', "start[", "<", "]"])
def test_double_the_grammar_takes_double_the_time(unit: str, start: str) -> None:
    """A quadratic search of 32,000 characters takes seconds, and four times as long as one of 16,000."""
    short, long = (seconds_for(start + unit * count) for count in (8_000, 32_000))
    assert long < 10 * short + 0.02
