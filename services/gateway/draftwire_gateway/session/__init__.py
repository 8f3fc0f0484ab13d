"""One completion: the outer loop, what it asks of its peers, and what it reports."""
