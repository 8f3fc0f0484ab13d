"""What every process is made of: life cycle, settings, logging, metrics, tracing, TLS, channels, messages."""
