"""Trains the embedded pair in `models/` on the Python standard library's sources.

The pair exists so that every command, test and benchmark of this repository runs on real text with real
disagreement between drafter and target, and without a download. `python -m tools.embedded_pair --help` lists the steps.
"""
