"""The drafter service: drafts tokens with a small model and sends them to verifiers."""
