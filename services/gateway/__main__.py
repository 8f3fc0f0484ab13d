"""`python -m draftwire.services.gateway`: see `--help`."""

from draftwire.services.options import main

if __name__ == "__main__":
    main("gateway")
