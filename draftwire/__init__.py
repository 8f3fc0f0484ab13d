"""draftwire: distributed speculative decoding that does not change a single probability."""

__version__ = "0.1.0"
