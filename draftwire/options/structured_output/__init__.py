"""Structured output: compiles the form of a text to an automaton, within limits, off the event loop."""
