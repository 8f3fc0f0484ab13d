"""`python -m draftwire_verifier`: see `--help`."""

from draftwire.runtime.options import main

if __name__ == "__main__":
    main("verifier")
