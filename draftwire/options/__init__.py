"""Options: what plugs into the path from outside, each in a folder of its own."""
