"""Models computed by several devices or processes: tensor parallelism."""
