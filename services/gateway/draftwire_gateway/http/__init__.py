"""The gateway's HTTP edge, compatible with OpenAI's API. Independent of gRPC."""
