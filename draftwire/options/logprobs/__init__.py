"""Log-probabilities of the tokens of a text: what is reported of them, and how it is read off the logits."""
