"""Generated from protos/draftwire/v1 by `make protos`. Do not edit."""
