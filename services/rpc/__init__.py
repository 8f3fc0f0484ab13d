"""The gRPC edge that the services share."""
