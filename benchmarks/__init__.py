"""Benchmarks. In their own processes the threads of torch wait as in the services."""

from draftwire.runtime.openmp import set_waiting

set_waiting()  # before any of them imports torch
