"""Coupled exact match: drafter and target draw with the same noise, and draft tokens are kept while both agree.

Every position t of the text has its own noise, one exponential variable e_t for every token, the same for every draw at
that position. The target's token is the winner of the race argmax p / e_t, which follows p exactly; the drafter's is
argmax q / e_t. Draft tokens are accepted while they are the target's winner; its first other winner is the extra token.

So the text is a function of key, prompt and target alone, independent of drafter, block length and batch, up to
near-ties: weights so close that differently shaped forward passes order them differently. No distribution is sent.
Where target and drafter differ, it accepts less than the other rules: a token matches with probability
sum over x of 1 / sum over y of max(p(y) / p(x), q(y) / q(x)).

Source: Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding"
(arXiv 2408.07978).
"""

import torch
from torch import Tensor

from draftwire.method.distributions import RaceOutcome, race
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import Noise, Outcome

ENTRIES_AT_ONCE = {"cpu": 2**18}
"""Logits that are raced at once, by device: the noise of this many stays in a processor's cache."""

MOST_ENTRIES_AT_ONCE = 2**23
"""The same for other devices: bounds the memory of the noise."""


class CoupledRule:
    """Accept x_i while the target draws the same token with the noise of its position."""

    name = "coupled"
    is_lossless = True
    needs_draft_probs = False
    is_coupled = True
    takes_trees = True

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        """Emits the target's winner at each position, up to the first that is not the draft token. Reads no draft
        distributions.
        """
        shape = (blocks.batch_size, blocks.max_len + 1)
        offsets = torch.arange(shape[1], device=blocks.lengths.device).expand(shape)
        is_row = offsets <= blocks.lengths.unsqueeze(1)
        block_of, offset_of = is_row.nonzero(as_tuple=True)
        rows = blocks.target_rows[is_row]
        found = raced(blocks.target_probs, rows, noise, block_of, offset_of)
        tokens = rows.new_zeros(shape).masked_scatter(is_row, found.winners)
        leads_of_all = torch.full(shape, torch.inf, dtype=torch.float64, device=rows.device)
        leads_of_all = leads_of_all.masked_scatter(is_row, found.leads)
        matches = (tokens[:, :-1] == blocks.draft_tokens) & blocks.inside
        num_accepted = matches.to(torch.int64).cumprod(dim=1).sum(dim=1)
        extra_tokens = tokens.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        is_emitted = offsets <= num_accepted.unsqueeze(1)
        return Outcome(num_accepted, extra_tokens, leads_of_all.masked_fill(~is_emitted, torch.inf))


def raced(target_probs: Tensor, rows: Tensor, noise: Noise, blocks: Tensor, offsets: Tensor) -> RaceOutcome:
    """Returns the winners of some `rows`, `[rows] int64`, of the target, `[any, vocab]`, with the noise of their
    positions: of the `blocks` and `offsets` that `Noise.exponentials` takes.
    """
    vocab_size = target_probs.shape[1]
    at_once = ENTRIES_AT_ONCE.get(rows.device.type, MOST_ENTRIES_AT_ONCE)
    parts = []
    for part in torch.arange(len(rows), device=rows.device).split(max(1, at_once // vocab_size)):
        times = noise.exponentials(blocks[part], offsets[part], vocab_size)
        parts.append(race(target_probs[rows[part]], times))
    return RaceOutcome(torch.cat([part.winners for part in parts]), torch.cat([part.leads for part in parts]))
