"""What a check found."""

from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """What may be wrong with a rule."""

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
    """One thing that is wrong."""

    kind: Kind
    where: str
    """The models and the block lengths that show it best."""
    size: float
    """How wrong: a difference of probabilities or of mean numbers of tokens, as the kind has it; 1 where it is wrong
    altogether."""

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.size:.2g} ({self.where})"


@dataclass(frozen=True, slots=True)
class RuleReport:
    """What is known of a rule after the check."""

    name: str
    is_lossless: bool
    """Whether it says that it is."""
    method: str
    """How laws were found: stated, decided, sampled, coupled, or stateful."""
    num_laws: int
    """How many laws of texts were compared with the target's."""
    deviation: float
    """The largest difference of any of their probabilities."""
    accepted: float
    """Mean number of accepted draft tokens in a round of three, over random models."""
    expected_accepted: float | None
    """What theory says about that; None where it says nothing about a rule of this name."""
    most_accepted: float
    """The most that it can be for a lossless rule that remembers nothing."""
    toy_accepted: float
    """The mean number in the example of Sun et al. 2024, of two: 10/9 for token, 11/9 for block verification, 12/9 for
    any rule at all."""
    failures: tuple[Failure, ...]
    """The worst of each kind; none if the rule is what it says."""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures


@dataclass(slots=True)
class Findings:
    """Gathers what the parts of a check find."""

    deviation: float = 0.0
    num_laws: int = 0
    _worst: dict[Kind, Failure] = field(default_factory=dict)

    def law(self, deviation: float) -> None:
        """Notes the deviation of a law; NaN stays."""
        self.num_laws += 1
        if not deviation <= self.deviation:
            self.deviation = deviation

    def require(self, kind: Kind, size: float, tolerance: float, where: str) -> None:
        """Notes a failure if `size` is above `tolerance`, or NaN."""
        if size <= tolerance:
            return
        known = self._worst.get(kind)
        if known is None or not size <= known.size:
            self._worst[kind] = Failure(kind, where, size)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The worst of each kind."""
        return tuple(self._worst[kind] for kind in Kind if kind in self._worst)
