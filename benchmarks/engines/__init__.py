"""Other engines as contestants of `benchmarks.peers`, each a script that the Python of its own environment runs.

A script gets the folders of the models as arguments, says `{}` when it has loaded them, and then answers tasks, a line
of JSON each. It imports nothing of draftwire.
"""
