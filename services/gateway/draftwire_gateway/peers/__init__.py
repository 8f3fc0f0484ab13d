"""Verifiers and drafters: where they are, which are ready, and what is said to them."""
