"""How long drafts are, chosen by what rounds cost and how much is accepted. Independent of gRPC and models."""
