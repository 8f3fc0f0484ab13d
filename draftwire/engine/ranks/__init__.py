"""Multi-process services, which share one model: rank 0 serves, the other ranks follow it."""
