"""Sections of `benchmarks.gpu`, one per file, and shared code."""
