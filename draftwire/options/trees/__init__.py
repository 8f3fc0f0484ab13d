"""Token trees: several continuations of one text, in one block."""
