"""Layer-parallel drafting: the attention of several layers of a drafter at once, here or on several devices."""
