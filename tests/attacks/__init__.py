"""Attacks on running services, and what other users notice of them. `python -m tests.attacks` carries them out."""
