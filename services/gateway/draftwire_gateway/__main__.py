"""`python -m draftwire_gateway`: see `--help`."""

from draftwire.runtime.options import main

if __name__ == "__main__":
    main("gateway")
