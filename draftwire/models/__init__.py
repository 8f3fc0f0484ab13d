"""Language models: loading, descriptions for peers, and forward passes over a KV cache that can be rolled back."""
