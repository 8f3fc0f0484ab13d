"""Generation of one completion: the outer loop, its ports to peers, and its results."""
