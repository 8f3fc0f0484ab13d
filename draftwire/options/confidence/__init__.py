"""Blocks that end where the drafter is not sure, and how sure it was of each place: docs/confidence.md."""
