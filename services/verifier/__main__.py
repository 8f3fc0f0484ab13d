"""`python -m draftwire.services.verifier`: see `--help`."""

from draftwire.services.options import main

if __name__ == "__main__":
    main("verifier")
