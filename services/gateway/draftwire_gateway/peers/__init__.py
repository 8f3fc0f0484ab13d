"""Verifiers and drafters: discovery, selection, and the gRPC streams to them."""
