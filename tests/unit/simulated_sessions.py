"""Sessions and costs for the tests of chosen lengths."""

from benchmarks.pair_simulation import SimulatedPair, round_times
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.speculation.pair_chooser import PairChooser
from draftwire_gateway.speculation.round_costs import RoundCosts, WindowSums
from draftwire_gateway.speculation.session_length import SessionLength
from draftwire_gateway.speculation.windows import Window

MS = 1e-3


def pair_of(verify_ms: float, row_us: float, draft_ms: float, acceptance: float, num_sessions: int) -> SimulatedPair:
    return SimulatedPair(verify_ms * MS, row_us * 1e-6, draft_ms * MS, lambda now: acceptance, num_sessions)


def of(length: int) -> Arm:
    return Arm(DraftSource.DRAFTER, length) if length else PLAIN


def costs_of(**seconds: float) -> RoundCosts:
    costs = RoundCosts()
    for name, round_s in seconds.items():
        length = int(name.removeprefix("of"))
        for _ in range(20):
            costs.add(of(length), WindowSums(20, 20 * round_s, 20 * 0.002, 20 * 0.001 * length, 20, 20.0), 1.0, 1.0)
    return costs


class InStep:
    """Sessions whose rounds all begin and end together, and of which no draft token is accepted."""

    def __init__(self, plain_s: float, draft_s: float) -> None:
        self.chooser = PairChooser(8, 4)
        self.now = 0.0
        self._plain_s, self._draft_s = plain_s, draft_s
        self._round = 0

    def resize(self, num_sessions: int) -> None:
        """Lets sessions come, whose prompts are read, or go."""
        while self.chooser.num_sessions < num_sessions:
            self.chooser.join()
            self.chooser.end_reading(self.now)
        while self.chooser.num_sessions > num_sessions:
            self.chooser.leave()

    def step(self) -> Arm:
        """Runs a round of each, and returns its arm."""
        window = self.chooser.window(self.now)
        took_s = self._plain_s + window.arm.length * self._draft_s
        times = (self.now, self.now + took_s, window.arm.length, 0, window.arm.length * self._draft_s, self._plain_s)
        for _ in range(self.chooser.num_sessions):
            own = round_times(self._round, *times)
            self.chooser.count(own, window, took_s, is_opening=False)
            if window.arm.length:
                self.chooser.acceptance.chains[DraftSource.DRAFTER].add(window.arm.length, 0)
            self.chooser.observe(own, window, is_whole=True)
        self.now += took_s
        self._round += 1
        return window.arm

    def steps(self, seconds: float) -> list[Arm]:
        """Runs rounds for some time, and returns their arms."""
        until, arms = self.now + seconds, []
        while self.now < until:
            arms.append(self.step())
        return arms


def first_probe(sessions: InStep) -> Window:
    """Returns the window of the first probe of drafts, in which a round has ended."""
    sessions.resize(16)
    while not sessions.step().length:
        pass
    window = sessions.chooser.window(sessions.now)
    assert window.is_probe
    return window


def run_rounds(
    chooser: PairChooser, session: SessionLength, first: int, now: float, seconds: float, round_s: float
) -> float:
    """Runs rounds that take so long each, and returns the time after them."""
    for number in range(first, first + round(seconds / round_s)):
        length = session.next_draft(number, 100, now).length
        session.observe(round_times(number, now, now + round_s, length, 0, 0.0, round_s))
        now += round_s
    return now


def beside(chooser: PairChooser) -> SessionLength:
    """Returns a session that has its prompt read, and counts as no load otherwise."""
    reader = SessionLength(chooser)
    chooser.num_sessions = 1
    return reader


def measured_plain_s(chooser: PairChooser) -> float:
    (load,) = chooser.explain(DraftSource.DRAFTER).loads
    return load.estimates[0].round_s
