"""Settings for all tests."""

import os

# Read when torch is imported: idle torch threads must sleep, for the tests start more processes than there are cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
