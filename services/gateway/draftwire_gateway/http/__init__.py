"""The gateway's HTTP edge, in the form that OpenAI gave such servers. Knows no gRPC."""
