"""Drafting strategies: propose the next few tokens with the distributions that they were drawn from."""
