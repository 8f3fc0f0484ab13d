"""Token trees in the place of chains."""
