"""Clients of other projects against running services: each feature as their users would use it."""
