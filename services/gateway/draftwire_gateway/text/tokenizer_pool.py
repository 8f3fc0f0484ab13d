"""Prompts to token ids, off the event loop: bounded, with a deadline, and fair between callers."""

import asyncio

from transformers import PreTrainedTokenizerBase

from draftwire.errors import ContextLengthError, InvalidRequestError, NoRoomError
from draftwire.models.description import ModelDescription
from draftwire.runtime.time_limits import Deadline
from draftwire_gateway.text.character_bound import characters_per_token
from draftwire_gateway.text.fair_threads import FairThreads

MAX_PROMPT_CHARACTERS = 4_000_000
"""Longer prompts are refused, whatever the model."""
TOKENIZE_SECONDS = 10.0
"""Timeout of one prompt, with its time in the queue."""
SHORT_CHARACTERS = 16_384
"""Prompts of at most this length have a thread of their own, on which each takes milliseconds."""
MAX_WAITING = 256
"""Most prompts being tokenised or in the queues."""


class TokenizerPool:
    """Tokenises prompts for one model, on two threads: short prompts do not wait for long ones, of which only one at a
    time takes memory. Each thread serves callers in turn. All methods run on the event loop.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, description: ModelDescription) -> None:
        """Reads the tokenizer's vocabulary."""
        self._tokenizer = tokenizer
        self._model = description
        self._per_token = characters_per_token(tokenizer)
        self._short, self._long = FairThreads(1, "tokenize-short"), FairThreads(1, "tokenize-long")
        self._num_waiting = 0

    async def encode(self, text: str, caller: str, **options: bool) -> list[int]:
        """Returns the token ids of a text, when it is the caller's turn. The options are those of transformers'
        tokenizer call.

        Raises:
            InvalidRequestError: the text is certainly longer than the context, or takes more than `TOKENIZE_SECONDS`.
            NoRoomError: too many prompts wait, or the timeout passed because of others.
        """
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise InvalidRequestError(f"the prompt has more than {MAX_PROMPT_CHARACTERS} characters")
        length = self._model.context_length
        if self._per_token is not None and len(text) > length * self._per_token:
            raise ContextLengthError.of(
                length, f"the prompt has {len(text)} characters, of which a token has {self._per_token} at most"
            )
        if self._num_waiting >= MAX_WAITING:
            raise NoRoomError(f"{MAX_WAITING} prompts wait to be tokenised, which is the limit")
        deadline = Deadline(TOKENIZE_SECONDS)

        def tokenize() -> list[int]:
            deadline.begin()
            return list(self._tokenizer(text, **options)["input_ids"])

        threads = self._short if len(text) <= SHORT_CHARACTERS else self._long
        self._num_waiting += 1
        try:
            async with asyncio.timeout(TOKENIZE_SECONDS):  # not `wait_for`: see form_compiler_pool.py
                return await threads.run(caller, tokenize)
        except TimeoutError as error:
            if deadline.has_waited:
                raise NoRoomError("other prompts are being tokenised") from error
            raise InvalidRequestError(f"the prompt takes more than {TOKENIZE_SECONDS:g} s to tokenise") from error
        finally:
            self._num_waiting -= 1
