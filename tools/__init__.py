"""What makes the files of this repository, and models to measure with. Not installed: run it from a clone."""
