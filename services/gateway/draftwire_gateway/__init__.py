"""The gateway: serves clients, and runs speculative decoding between a drafter and a verifier."""
