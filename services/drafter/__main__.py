"""`python -m draftwire.services.drafter`: see `--help`."""

from draftwire.services.options import main

if __name__ == "__main__":
    main("drafter")
