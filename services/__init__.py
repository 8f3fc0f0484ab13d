"""The three processes. Installed, and imported, as `draftwire.services`."""
