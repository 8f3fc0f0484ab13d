"""Language models as the services use them: loading, describing, and running with a cache that can be rolled back."""
