"""What users import to talk to a gateway. Needs neither torch nor transformers."""

from draftwire.client.completion import Completion, Piece
from draftwire.client.stream import CompletionStream
from draftwire.client.sync import Client
from draftwire.logprobs import TokenLogprob
from draftwire.structured_output import StructuredOutput
from draftwire.token_source import TokenSource

__all__ = ["Client", "Completion", "CompletionStream", "Piece", "StructuredOutput", "TokenLogprob", "TokenSource"]
