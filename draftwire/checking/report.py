"""Report of a check, and the failures that it found."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from draftwire.checking.toy_models import Pair


class Kind(Enum):
    """Kinds of failures of a rule."""

    LAW = "the output is not distributed as the target's"
    NO_LAW = "what the rule states is no law: negative, or not summing to 1"
    GREEDY = "a greedy target does not give its greedy text"
    ACCEPTED = "the mean number of accepted tokens is not what it can be"
    DRAWING = "what is decided does not follow the law that the rule states"
    IMPOSSIBLE = "a token of probability 0 is emitted at the ends of the uniform numbers"
    NOISE = "noise is not used as the drafter's is"
    BATCH = "an outcome depends on what else is in the batch"
    SPARSE = "sparse draft distributions do not count as the same dense ones"
    WIRE = "draft distributions that travel as bytes make another law"
    RAISED = "the rule raised"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed check."""

    kind: Kind
    where: str
    """The models and block lengths where the failure is largest."""
    size: float
    """Difference of probabilities or of mean numbers of tokens, depending on the kind; 1 where there is no measure."""

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.size:.2g} ({self.where})"


@dataclass(frozen=True, slots=True)
class Report:
    """Result of the check of a rule of any kind."""

    name: str
    is_lossless: bool
    """Whether the rule declares itself lossless."""
    method: str
    """How laws were computed: stated, decided, sampled, coupled, or stateful; of trees stated or walked."""
    num_laws: int
    """How many laws of texts were compared with the target's."""
    deviation: float
    """The largest difference of a probability in these comparisons."""
    failures: tuple[Failure, ...]
    """The largest failure of each kind; empty if the rule passed."""

    @property
    def passed(self) -> bool:
        """Whether there are no failures."""
        return not self.failures


@dataclass(frozen=True, slots=True)
class RuleReport(Report):
    """Result of the check of a rule."""

    accepted: float
    """Mean number of accepted draft tokens in a round of three, over random models."""
    expected_accepted: float | None
    """The theoretical value of `accepted`; None for rules without one."""
    most_accepted: float
    """The upper bound of `accepted` for a stateless lossless rule."""
    toy_accepted: float
    """Mean number of accepted tokens, of two drafted, in the example of Sun et al. 2024: 10/9 for token verification,
    11/9 for block verification, at most 12/9 for any rule."""


@dataclass(frozen=True, slots=True)
class TreeReport(Report):
    """Result of the check of a rule for trees."""

    accepted: tuple[float | None, ...]
    """Mean number of accepted draft tokens for each shape of `tree_checks.COMPARED_SHAPES`, over random models; None
    for a shape that the rule does not take."""


@dataclass(slots=True)
class Findings:
    """Collects deviations and failures over the parts of a check."""

    deviation: float = 0.0
    num_laws: int = 0
    _worst: dict[Kind, Failure] = field(default_factory=dict)

    def judge(self, deviation: float, tolerance: float, pair: Pair, is_lossless: bool, where: str) -> None:
        """Records by how much a law deviates from the target's; a NaN is kept. Only lossy rules may deviate, and not
        where the target is greedy.
        """
        self.num_laws += 1
        if not deviation <= self.deviation:
            self.deviation = deviation
        if pair.is_greedy:
            self.require(Kind.GREEDY, deviation, tolerance, where)
        if is_lossless:
            self.require(Kind.LAW, deviation, tolerance, where)

    def require(self, kind: Kind, size: float, tolerance: float, where: str) -> None:
        """Records a failure if `size` is above `tolerance` or NaN."""
        if size <= tolerance:
            return
        known = self._worst.get(kind)
        if known is None or not size <= known.size:
            self._worst[kind] = Failure(kind, where, size)

    @contextmanager
    def recording_errors(self) -> Iterator[None]:
        """Records an exception of the rule as a failure."""
        try:
            yield
        except Exception as error:
            self.require(Kind.RAISED, 1.0, 0.0, f"{type(error).__name__}: {error}".splitlines()[0][:200])

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The largest failure of each kind."""
        return tuple(self._worst[kind] for kind in Kind if kind in self._worst)
