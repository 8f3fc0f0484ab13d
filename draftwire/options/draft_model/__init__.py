"""A small language model that drafts inside the verifier's process."""
