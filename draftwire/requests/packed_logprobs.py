"""Wire format of the log-probabilities of tokens. Needs no package besides Python."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from draftwire.errors import InvalidRequestError
from draftwire.requests.logprobs import MAX_LOGPROBS, TokenLogprob


@dataclass(frozen=True, slots=True)
class PackedTop:
    """Wire format of the likeliest tokens at several positions."""

    num_top: int
    """Entries per position."""
    token_ids: bytes
    """uint32 little-endian `[places, num_top]`."""
    logprobs: bytes
    """float32 little-endian `[places, num_top]`; -inf in unused entries."""


def pack_top(tokens: Sequence[TokenLogprob]) -> PackedTop | None:
    """Encodes the likeliest tokens; None if there are none."""
    num_top = max((len(token.top) for token in tokens), default=0)
    if num_top == 0:
        return None
    ids: list[int] = []
    logprobs: list[float] = []
    for token in tokens:
        padding = num_top - len(token.top)
        ids += [*(one for one, _ in token.top), *([0] * padding)]
        logprobs += [*(value for _, value in token.top), *([-math.inf] * padding)]
    return PackedTop(num_top, struct.pack(f"<{len(ids)}I", *ids), struct.pack(f"<{len(ids)}f", *logprobs))


def unpack_top(token_ids: Sequence[int], logprobs: Sequence[float], packed: PackedTop | None) -> list[TokenLogprob]:
    """Decodes received log-probabilities. `logprobs` are empty and `packed` is None where they are not reported.

    Returns:
        One entry for each token; empty if nothing is reported.

    Raises:
        InvalidRequestError: the sizes are inconsistent, or a number is no log-probability.
    """
    if not len(logprobs) and packed is None:
        return []
    num_top = packed.num_top if packed is not None else 0
    size = len(token_ids) * num_top
    if len(logprobs) != len(token_ids) or not 0 <= num_top <= MAX_LOGPROBS:
        raise InvalidRequestError(f"{len(logprobs)} log-probabilities, {num_top} top ones, of {len(token_ids)} tokens")
    if packed is not None and not len(packed.token_ids) == len(packed.logprobs) == 4 * size:
        raise InvalidRequestError(f"top log-probabilities do not have the {4 * size} bytes that {size} entries take")
    ids = struct.unpack(f"<{size}I", packed.token_ids) if packed is not None else ()
    values = struct.unpack(f"<{size}f", packed.logprobs) if packed is not None else ()
    if not all(value <= 0.0 for value in (*logprobs, *values)):
        raise InvalidRequestError("a log-probability is a number of at most 0")
    pairs = list(zip(ids, values, strict=True))
    return [
        TokenLogprob(
            token, own, [pair for pair in pairs[index * num_top : (index + 1) * num_top] if pair[1] > -math.inf]
        )
        for index, (token, own) in enumerate(zip(token_ids, logprobs, strict=True))
    ]
