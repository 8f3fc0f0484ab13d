"""Coupled exact match: drafter and target draw with the same noise, and draft tokens are kept while both agree.

Every place t of the text has its own noise, one exponential variable e_t for every token, the same whenever something
is drawn there. The target's token is the winner of the race argmax p / e_t, which follows p exactly; the drafter's is
argmax q / e_t. A draft token is kept while it is the target's winner, and the first other winner is the extra token.

So the text is a function of key, prompt and target alone, whatever the drafter, the block length and the batch, up to
near-ties: weights so close that differently shaped forward passes order them differently. No distribution travels.
Where target and drafter differ, less is accepted than by the other rules: a token matches with probability
sum over x of 1 / sum over y of max(p(y) / p(x), q(y) / q(x)).

Source: Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding"
(arXiv 2408.07978).
"""

import torch

from draftwire.method.distributions import race
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import Noise, Outcome

ENTRIES_AT_ONCE = {"cpu": 2**18}
"""Entries over the vocabulary that are raced together: the noise of so many stays in a processor's cache."""

MOST_ENTRIES_AT_ONCE = 2**23
"""The same where there is no such number: bounds the memory that their noise takes."""


class CoupledRule:
    """Accept x_i while it is what the target draws with the noise of its place."""

    name = "coupled"
    is_lossless = True
    needs_draft_probs = False
    is_coupled = True

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        """Emits what wins each place's race until one is not the draft token. Reads no distributions of the drafter."""
        shape = (blocks.batch_size, blocks.max_len + 1)
        offsets = torch.arange(shape[1], device=blocks.lengths.device).expand(shape)
        is_row = offsets <= blocks.lengths.unsqueeze(1)
        block_of, offset_of = is_row.nonzero(as_tuple=True)
        rows = blocks.target_rows[is_row]
        vocab_size = blocks.target_probs.shape[1]
        winners, leads = [], []
        at_once = ENTRIES_AT_ONCE.get(rows.device.type, MOST_ENTRIES_AT_ONCE)
        for part in torch.arange(len(rows), device=rows.device).split(max(1, at_once // vocab_size)):
            times = noise.exponentials(block_of[part], offset_of[part], vocab_size)
            outcome = race(blocks.target_probs[rows[part]], times)
            winners.append(outcome.winners)
            leads.append(outcome.leads)
        tokens = rows.new_zeros(shape).masked_scatter(is_row, torch.cat(winners))
        leads_of_all = torch.full(shape, torch.inf, dtype=torch.float64, device=rows.device)
        leads_of_all = leads_of_all.masked_scatter(is_row, torch.cat(leads))
        matches = (tokens[:, :-1] == blocks.draft_tokens) & blocks.inside
        num_accepted = matches.to(torch.int64).cumprod(dim=1).sum(dim=1)
        extra_tokens = tokens.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        is_emitted = offsets <= num_accepted.unsqueeze(1)
        return Outcome(num_accepted, extra_tokens, leads_of_all.masked_fill(~is_emitted, torch.inf))
