"""How many tokens of drafts are accepted, by position, with forgetting."""

UNKNOWN_RATE = 0.7
"""Share of the tokens at a position that are accepted before anything is known: that of usual pairs."""
PRIOR = 4.0
"""Drafts, or rounds, that what is expected counts like."""
MEMORY = 256.0
"""Drafts that are remembered at each position: some texts."""
RECENT = 16.0
"""Drafts that are compared with those, and rounds of each session that a mean of times is over: a few sentences."""
ROUNDS = 8
"""Rounds between choices, and of a trial: times of so many tell a way that is worse by a tenth."""
SURPRISE = 4.5
"""Standard errors by which the recent drafts may differ: chance does that once in hundreds of thousands of drafts."""


class AcceptedCounts:
    """By position, of how many drafts that reached it the token was accepted: in a long memory and in a short one.
    Where they differ beyond chance, the text has changed, and the long one is begun anew by the short one.
    """

    def __init__(self, prior: "AcceptedCounts | None" = None) -> None:
        """Knows nothing: expects what a prior does, which may still change, or `UNKNOWN_RATE`."""
        self._prior = prior
        self._reached: list[float] = []
        """Drafts that reached each position, and below those whose token there was accepted."""
        self._accepted: list[float] = []
        self._reached_lately: list[float] = []
        self._accepted_lately: list[float] = []
        self._weight = 1.0
        """Of a draft in the short memory, which grows in place of what all others would fade by."""
        self.num_drafts = 0

    def add(self, num_tokens: int, num_accepted: int) -> None:
        """Adds a draft of which the first `num_accepted` tokens were accepted."""
        self.num_drafts += 1
        self._weight /= 1.0 - 1.0 / RECENT
        weight, reached, accepted = self._weight, self._reached, self._accepted
        reached_lately, accepted_lately = self._reached_lately, self._accepted_lately
        num_reached = min(num_tokens, num_accepted + 1)
        if num_reached > min(len(reached), len(reached_lately)):
            for counts in (reached, accepted, reached_lately, accepted_lately):
                counts.extend([0.0] * (num_reached - len(counts)))
        for at in range(num_reached):
            reached[at] += 1.0 - reached[at] / MEMORY
            reached_lately[at] += weight
            accepted[at] -= accepted[at] / MEMORY
            if at < num_accepted:
                accepted[at] += 1.0
                accepted_lately[at] += weight
        if self.num_drafts % ROUNDS == 0:
            self._reached_lately = [count / weight for count in self._reached_lately]
            self._accepted_lately = [count / weight for count in self._accepted_lately]
            self._weight = 1.0
            if self._is_surprised():
                self._reached = [count * PRIOR / RECENT for count in self._reached_lately]
                self._accepted = [count * PRIOR / RECENT for count in self._accepted_lately]

    def rates(self, num_tokens: int) -> list[float]:
        """Returns P(at least k tokens are accepted, given that k - 1 are) for k = 1 to `num_tokens`."""
        expected = None if self._prior is None else self._prior.rates(num_tokens)
        weight = PRIOR if expected is None else RECENT
        rates, rate = [], UNKNOWN_RATE
        for position in range(num_tokens):
            if expected is not None:
                rate = expected[position]  # else a token fares as the one before it, until more is known
            if position < len(self._reached):
                rate = (self._accepted[position] + weight * rate) / (self._reached[position] + weight)
            rates.append(rate)
        return rates

    def survival(self, num_tokens: int) -> list[float]:
        """Returns P(at least k tokens are accepted) for k = 0 to `num_tokens`."""
        survival = [1.0]
        for rate in self.rates(num_tokens):
            survival.append(survival[-1] * rate)
        return survival

    def _is_surprised(self) -> bool:
        error = variance = 0.0
        for at, rate in enumerate(self.rates(len(self._reached))):
            error += self._accepted_lately[at] - self._reached_lately[at] * rate
            variance += self._reached_lately[at] * rate * (1.0 - rate)
        return error**2 > SURPRISE**2 * (variance / 2.0 + 1.0)  # fading leaves half of the variance
