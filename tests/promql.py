"""As much of Prometheus's query language as our dashboard and alerts use: parsed, and evaluated on given series.

What is beyond it is refused, so that a query which these tests cannot judge does not pass them. Rates are taken between
the first and the last sample of the range; Prometheus moreover stretches them to the range's ends.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Value = float | Vector

NAME = "__name__"
LOOK_BACK_S = 300.0
"""A sample that is older is no value of now."""

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
TOKEN = re.compile(
    r"\s*(?:(?P<duration>\d+[smhd]\b)|(?P<number>\d+(?:\.\d+)?)|(?P<name>[A-Za-z_][\w:]*)|(?P<string>\"[^\"]*\")"
    r"|(?P<sign>=~|!~|!=|>=|<=|==|[-+*/(){}\[\],=<>]))"
)
AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "avg": lambda values: sum(values) / len(values),
    "count": lambda values: float(len(values)),
}
COMPARISONS = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
SUMS = {"+": operator.add, "-": operator.sub}
PRODUCTS: dict[str, Callable[[float, float], float]] = {
    "*": operator.mul,
    "/": lambda left, right: left / right if right else (math.nan if not left else math.copysign(math.inf, left)),
}


@dataclass(frozen=True)
class Series:
    """What Prometheus has scraped of one series."""

    labels: Mapping[str, str]
    """The name is among them, as `__name__`."""
    samples: Sequence[tuple[float, float]]
    """Times and values, the oldest first."""


@dataclass(frozen=True)
class Selector:
    """Asks for series."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]
    """Label, sign and value."""
    range_s: float | None = None
    offset_s: float = 0.0

    def matches(self, labels: Mapping[str, str]) -> bool:
        return labels[NAME] == self.name and all(
            {
                "=": lambda mine, wanted: mine == wanted,
                "!=": lambda mine, wanted: mine != wanted,
                "=~": lambda mine, wanted: re.fullmatch(wanted, mine) is not None,
                "!~": lambda mine, wanted: re.fullmatch(wanted, mine) is None,
            }[sign](labels.get(label, ""), value)
            for label, sign, value in self.matchers
        )


@dataclass(frozen=True)
class Call:
    """A function, or an aggregation with the labels that it keeps."""

    function: str
    arguments: tuple["Query", ...]
    by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Binary:
    """Two queries and a sign between them."""

    sign: str
    left: "Query"
    right: "Query"


Query = float | Selector | Call | Binary


def parse(text: str) -> Query:
    """Reads a query.

    Raises:
        AssertionError: it is none, or uses what is not supported here.
    """
    return _Parser(text).whole()


def parts_of(query: Query) -> Iterator[Query]:
    """Yields a query and all queries inside it."""
    yield query
    inside: Sequence[Query] = ()
    if isinstance(query, Call):
        inside = query.arguments
    elif isinstance(query, Binary):
        inside = (query.left, query.right)
    for part in inside:
        yield from parts_of(part)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        end = 0
        while text[end:].strip():
            found = TOKEN.match(text, end)
            assert found is not None, f"cannot read {text[end:]!r} in {text}"
            assert found.lastgroup is not None, "one of the groups matches"
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            end = found.end()
        self._tokens.append(("end", ""))

    def whole(self) -> Query:
        query = self._binary(0)
        self._take("end")
        return query

    LEVELS = (("or",), ("and", "unless"), tuple(COMPARISONS), tuple(SUMS), tuple(PRODUCTS))

    def _binary(self, level: int) -> Query:
        if level == len(self.LEVELS):
            return self._atom()
        left = self._binary(level + 1)
        while self._next in self.LEVELS[level]:
            sign = self._tokens.pop(0)[1]
            left = Binary(sign, left, self._binary(level + 1))
        return left

    def _atom(self) -> Query:
        kind, text = self._tokens.pop(0)
        if kind == "number":
            return float(text)
        if text == "(":
            query = self._binary(0)
            self._take("sign", ")")
            return query
        assert kind == "name", f"{text!r} in {self._text}"
        if text in AGGREGATIONS:
            by = self._names() if self._skip("by") else ()
            return Call(text, self._arguments(), by or (self._names() if self._skip("by") else ()))
        if self._next == "(":
            return Call(text, self._arguments())
        return self._selector(text)

    def _selector(self, name: str) -> Selector:
        matchers: list[tuple[str, str, str]] = []
        if self._skip("{"):
            while not self._skip("}"):
                label, sign = self._take("name"), self._take("sign")
                assert sign in ("=", "!=", "=~", "!~"), self._text
                matchers.append((label, sign, self._take("string").strip('"')))
                self._skip(",")
        range_s = None
        if self._skip("["):
            range_s = self._duration()
            self._take("sign", "]")
        offset_s = self._duration() if self._skip("offset") else 0.0
        return Selector(name, tuple(matchers), range_s, offset_s)

    def _arguments(self) -> tuple[Query, ...]:
        self._take("sign", "(")
        arguments = [self._binary(0)]
        while self._skip(","):
            arguments.append(self._binary(0))
        self._take("sign", ")")
        return tuple(arguments)

    def _names(self) -> tuple[str, ...]:
        self._take("sign", "(")
        names = [self._take("name")]
        while self._skip(","):
            names.append(self._take("name"))
        self._take("sign", ")")
        return tuple(names)

    def _duration(self) -> float:
        text = self._take("duration")
        return float(text[:-1]) * UNITS[text[-1]]

    @property
    def _next(self) -> str:
        return self._tokens[0][1]

    def _skip(self, text: str) -> bool:
        is_next = self._next == text
        if is_next:
            self._tokens.pop(0)
        return is_next

    def _take(self, kind: str, text: str | None = None) -> str:
        found = self._tokens.pop(0)
        fits = found[0] == kind and text in (None, found[1])
        assert fits, f"{found[1]!r} instead of {text or kind} in {self._text}"
        return found[1]


def evaluate(query: Query, series: Sequence[Series], now: float) -> Value:
    """Returns what a query gives at a time."""
    match query:
        case float():
            return query
        case Selector(range_s=None):
            found: Vector = {}
            at = now - query.offset_s
            for each in series:
                samples = [value for time, value in each.samples if at - LOOK_BACK_S < time <= at]
                if query.matches(each.labels) and samples:
                    found[frozenset(each.labels.items())] = samples[-1]
            return found
        case Binary():
            return _join(query.sign, evaluate(query.left, series, now), evaluate(query.right, series, now))
        case Call(function, arguments, by):
            if function in ("rate", "increase"):
                return _growth(arguments[0], series, now, per_second=function == "rate")
            values = [evaluate(argument, series, now) for argument in arguments]
            return _apply(function, values, by)
    raise AssertionError(f"{query} stands outside of rate and increase")


def _growth(selector: Query, series: Sequence[Series], now: float, *, per_second: bool) -> Vector:
    assert isinstance(selector, Selector), "growth is of a range"
    assert selector.range_s is not None, "growth is of a range"
    found: Vector = {}
    end = now - selector.offset_s
    for each in series:
        samples = [(time, value) for time, value in each.samples if end - selector.range_s <= time <= end]
        if selector.matches(each.labels) and len(samples) > 1:
            steps = [(before[1], after[1]) for before, after in pairwise(samples)]
            growth = sum(after - before if after >= before else after for before, after in steps)
            rate = growth / (samples[-1][0] - samples[0][0])
            found[_unnamed(each.labels)] = rate if per_second else rate * selector.range_s
    return found


def _apply(function: str, values: list[Value], by: tuple[str, ...]) -> Value:
    if function == "vector":
        assert isinstance(values[0], float)
        return {frozenset(): values[0]}
    if function == "histogram_quantile":
        share, buckets = values
        assert isinstance(share, float)
        assert isinstance(buckets, dict)
        return _quantiles(share, buckets)
    assert function in AGGREGATIONS, f"{function} is not supported here"
    (vector,) = values
    assert isinstance(vector, dict), "vectors are aggregated"
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        groups.setdefault(frozenset((name, text) for name, text in labels if name in by), []).append(value)
    return {labels: AGGREGATIONS[function](group) for labels, group in groups.items()}


def _quantiles(share: float, buckets: Vector) -> Vector:
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        bound = float(dict(labels)["le"])
        groups.setdefault(frozenset(pair for pair in labels if pair[0] != "le"), []).append((bound, count))
    return {labels: _quantile(share, sorted(group)) for labels, group in groups.items()}


def _quantile(share: float, buckets: list[tuple[float, float]]) -> float:
    rank = share * buckets[-1][1]
    below = low = 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        below, low = count, bound
    return math.nan


def _join(sign: str, left: Value, right: Value) -> Value:
    if sign in ("or", "and", "unless"):
        assert isinstance(left, dict), f"{sign} joins vectors"
        assert isinstance(right, dict), f"{sign} joins vectors"
        others = {_unnamed(dict(labels)) for labels in right}
        if sign == "or":
            mine = {_unnamed(dict(labels)) for labels in left}
            return left | {labels: value for labels, value in right.items() if _unnamed(dict(labels)) not in mine}
        return {
            labels: value for labels, value in left.items() if (_unnamed(dict(labels)) in others) == (sign == "and")
        }
    if isinstance(left, float) and isinstance(right, float):
        assert sign not in COMPARISONS, "numbers are compared with nothing but vectors"
        return (SUMS | PRODUCTS)[sign](left, right)
    pairs: dict[Labels, tuple[float, float]] = {}
    if isinstance(right, float):
        assert isinstance(left, dict)
        pairs = {labels: (value, right) for labels, value in left.items()}
    elif isinstance(left, float):
        pairs = {labels: (left, value) for labels, value in right.items()}
    else:
        of_right = {_unnamed(dict(labels)): value for labels, value in right.items()}
        pairs = {
            labels: (value, of_right[_unnamed(dict(labels))])
            for labels, value in left.items()
            if _unnamed(dict(labels)) in of_right
        }
    if sign in COMPARISONS:
        kept = 1 if isinstance(left, float) else 0
        return {labels: pair[kept] for labels, pair in pairs.items() if COMPARISONS[sign](*pair)}
    return {_unnamed(dict(labels)): (SUMS | PRODUCTS)[sign](*pair) for labels, pair in pairs.items()}


def _unnamed(labels: Mapping[str, str]) -> Labels:
    return frozenset((name, text) for name, text in labels.items() if name != NAME)
