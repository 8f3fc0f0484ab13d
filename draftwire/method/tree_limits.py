"""How large a token tree may be. Imports nothing: the command line names the limit."""

MAX_TREE_NODES = 64
"""Draft tokens of a tree at most: as many as recorded steps take."""
