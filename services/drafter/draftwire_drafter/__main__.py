"""`python -m draftwire_drafter`: see `--help`."""

from draftwire.runtime.options import main

if __name__ == "__main__":
    main("drafter")
