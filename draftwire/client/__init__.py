"""What users import to talk to a gateway. Needs neither torch nor transformers."""

from draftwire.client.sync import Client, Completion, CompletionStream, Piece
from draftwire.logprobs import TokenLogprob

__all__ = ["Client", "Completion", "CompletionStream", "Piece", "TokenLogprob"]
