"""A service of several processes, which compute its model together: rank 0 serves, the others follow it."""
