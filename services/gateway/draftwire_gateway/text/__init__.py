"""Chat templates, and incremental detokenisation."""
