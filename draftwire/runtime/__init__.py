"""Building blocks of every process: life cycle, settings, logging, metrics, tracing, TLS, channels, messages."""
