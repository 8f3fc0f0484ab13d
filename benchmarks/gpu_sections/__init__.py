"""The sections of `benchmarks.gpu`, one per file, and what they share."""
