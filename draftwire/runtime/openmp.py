"""How the threads of torch wait for each other."""

import os

NUM_SPINS = 10_000
"""Looks of a waiting thread before it sleeps, 0.1 to 0.3 ms together: longer than the time between two operations of a
forward pass, since to wake a thread takes up to 0.1 ms, and shorter than the time that another process on the same
cores would notice."""


def set_waiting() -> None:
    """Lets waiting threads of OpenMP spin briefly and then sleep. To be called before torch is imported.

    The user's own variables are left alone. `GOMP_SPINCOUNT` is of GNU's library, which torch uses on Linux.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", str(NUM_SPINS))
