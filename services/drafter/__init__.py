"""The process that guesses."""
