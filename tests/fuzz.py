"""Feeds broken draft blocks to what decodes them, and compares it with a slow reading of the format in plain Python.

    python -m tests.fuzz --messages 1000000 [--seed N]
    python -m tests.fuzz --gguf 10000               # broken files of models instead: tests/gguf_fuzz.py

Messages come in batches, as a drafter sends them: some are valid and keep their meaning whatever stands beside them;
the others were mutated, as bytes or field by field. Each is refused, or has exactly the meaning that the slow reading
finds; an exception is a fault.
"""

import argparse
import math
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from google.protobuf.message import DecodeError

from draftwire.errors import BlockViolationError
from draftwire.method.encoding import DenseProbs, Supports
from draftwire.method.rounds import ReceivedBlock
from draftwire.runtime import messages
from draftwire.v1 import session_pb2
from tests import gguf_fuzz

SPARSE = session_pb2.DISTRIBUTION_ENCODING_SPARSE_UINT16
FLOAT32 = session_pb2.DISTRIBUTION_ENCODING_DENSE_FLOAT32
FLOAT16 = session_pb2.DISTRIBUTION_ENCODING_DENSE_FLOAT16
ONE_HOT = session_pb2.DISTRIBUTION_ENCODING_ONE_HOT
NONE = session_pb2.DISTRIBUTION_ENCODING_NONE
DENSE = {FLOAT32: ("f", 4, 1e-3), FLOAT16: ("e", 2, 2e-2)}
"""Letter of `struct`, bytes, and how far a sum may be from 1."""

TOTAL = 65_536
MAX_DRAFT_TOKENS = 16
MAX_TREE_NODES = 12
BATCH = 96
VALID_SHARE = 0.1
TRANSPORT = "transport"
"""Why bytes are refused that are no message at all."""

Row = dict[int, float]
"""The tokens that a position can have, with weights of any sum."""


class Target(NamedTuple):
    """Who receives the blocks."""

    vocab_size: int
    sparse_vocab_sizes: Sequence[int]
    dense_vocab_sizes: Sequence[int]


TARGETS = (
    Target(40, sparse_vocab_sizes=(1, 2, 7, 39, 40), dense_vocab_sizes=(1, 2, 7, 39, 40)),
    Target(200_000, sparse_vocab_sizes=(50, 256, 257, 65_536, 65_537, 200_000), dense_vocab_sizes=()),
)


class DecodingFaultError(Exception):
    """A message was not decoded as the format says."""


@dataclass(slots=True)
class Counts:
    """What became of the messages."""

    messages: int = 0
    valid: int = 0
    """Sent as they were made."""
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)


# The format in plain Python


def id_width(vocab_size: int) -> int:
    return 1 if vocab_size <= 2**8 else 2 if vocab_size <= 2**16 else 3 if vocab_size <= 2**24 else 4


def read_sparse(stated: session_pb2.DraftDistributions, num_tokens: int) -> list[Row] | None:
    data, sizes, wide_sizes = stated.data, stated.support_sizes, stated.wide_sizes
    width, total = id_width(stated.vocab_size), sum(sizes)
    if not len(sizes) == len(wide_sizes) == num_tokens or len(data) != total * (width + 1) + sum(wide_sizes):
        return None
    ids = [int.from_bytes(data[start : start + width], "little") for start in range(0, total * width, width)]
    start, high = 0, total * (width + 1)
    rows = []
    for size, wide in zip(sizes, wide_sizes, strict=True):
        row: Row = {}
        for place in range(size):
            weight = data[total * width + start + place] + 1
            if place < wide:
                weight += 256 * data[high + place]
            row[ids[start + place]] = weight
        if not 1 <= size <= 1024 or wide > size or len(row) != size:
            return None
        if max(row) >= stated.vocab_size or sum(row.values()) != TOTAL:
            return None
        rows.append(row)
        start, high = start + size, high + wide
    return rows


def read_dense(data: bytes, encoding: int, num_tokens: int, vocab_size: int) -> list[Row] | None:
    letter, width, error = DENSE[encoding]
    if len(data) != num_tokens * vocab_size * width:
        return None
    rows: list[Row] = []
    for numbers in struct.iter_unpack(f"<{vocab_size}{letter}", data):
        # A NaN fails the first comparison, an infinity the second.
        if not all(number >= 0.0 for number in numbers) or not abs(math.fsum(numbers) - 1.0) < error:
            return None
        rows.append(dict(enumerate(numbers)))
    return rows


def read(message: session_pb2.DraftBlock, target_vocab_size: int) -> list[Row] | None:
    """Returns what a block says of each of its tokens; None if it has to be refused."""
    stated, tokens = message.distributions, list(message.token_ids)
    vocab_size, encoding = stated.vocab_size, stated.encoding
    own = rows_of_tokens(message)
    if own is None:
        return None
    has_twins = len({*zip(own, tokens, strict=True)}) < len(tokens)
    if message.parent_indices and encoding != NONE and (encoding == ONE_HOT or has_twins):
        return None
    if not 1 <= vocab_size <= target_vocab_size or max(tokens) >= vocab_size:
        return None
    if encoding == SPARSE:
        rows = read_sparse(stated, max(own) + 1)
    elif stated.support_sizes or stated.wide_sizes:
        return None
    elif encoding in DENSE:
        rows = read_dense(stated.data, encoding, max(own) + 1, vocab_size)
    else:
        own = list(range(len(tokens)))
        rows = [{token: TOTAL} for token in tokens] if encoding in (ONE_HOT, NONE) and not stated.data else None
    if rows is None or any(not rows[row].get(token, 0) > 0 for row, token in zip(own, tokens, strict=True)):
        return None
    return rows


def rows_of_tokens(message: session_pb2.DraftBlock) -> list[int] | None:
    """Returns which distribution each token was drawn from; None if the block has a wrong size or shape."""
    parents, num_tokens = list(message.parent_indices), len(message.token_ids)
    if not parents:
        return list(range(num_tokens)) if 1 <= num_tokens <= MAX_DRAFT_TOKENS else None
    if len(parents) != num_tokens or num_tokens > MAX_TREE_NODES:
        return None
    if not all(-1 <= parent < node for node, parent in enumerate(parents)):
        return None
    with_children = sorted({*parents})
    return [with_children.index(parent) for parent in parents]


def difference(received: ReceivedBlock, rows: list[Row] | None, target_vocab_size: int) -> str | None:
    """Returns what a decoded block has that it should not have."""
    draft = received.draft
    if isinstance(draft, BlockViolationError):
        return None if rows is None else f"refused ({draft}), but right"
    if rows is None:
        return "accepted, but wrong"
    if len(draft.token_ids if isinstance(draft, Supports) else draft.probs) != len(rows):
        return "another number of distributions"
    if isinstance(draft, Supports):
        found = zip(draft.token_ids.tolist(), draft.weights.tolist(), strict=True)
        for row, (ids, weights) in zip(rows, found, strict=True):
            used = [entry for entry in zip(ids, weights, strict=True) if entry[1] != 0]
            if len(used) != len(row) or dict(used) != row or not 0 <= min(ids) <= max(ids) < target_vocab_size:
                return "other weights"
        return None if draft.vocab_size == target_vocab_size else "another vocabulary"
    assert isinstance(draft, DenseProbs)
    for row, probs in zip(rows, draft.probs.tolist(), strict=True):
        total = math.fsum(row.values())
        if len(probs) != len(row) or not abs(math.fsum(probs) - 1.0) < 1e-6:
            return "no distribution over the draft vocabulary"
        for token, weight in row.items():
            if abs(probs[token] - weight / total) > 1e-7 or (probs[token] > 0.0) != (weight > 0.0):
                return "other probabilities"
    return None if draft.vocab_size == target_vocab_size else "another vocabulary"


# Valid blocks


@dataclass(frozen=True, slots=True)
class Sample:
    """A valid block."""

    wire: bytes
    rows: list[Row]


def parted(generator: random.Random, total: int, count: int) -> list[int]:
    """Returns positive integers of a sum, alike or most of them small, in any order or falling."""
    bound = generator.choice((total, 4_000))
    cuts = [0, *sorted(generator.sample(range(1, bound), count - 1)), total]
    parts = [end - start for start, end in pairwise(cuts)]
    generator.shuffle(parts)
    return sorted(parts, reverse=True) if generator.random() < 0.5 else parts


def message_of(
    generator: random.Random, encoding: int, vocab_size: int, tokens: list[int], data: bytes
) -> session_pb2.DraftBlock:
    return session_pb2.DraftBlock(
        fence=session_pb2.Fence(session_id=generator.getrandbits(64), epoch=1, round=generator.randrange(500)),
        token_ids=tokens,
        distributions=session_pb2.DraftDistributions(encoding=encoding, vocab_size=vocab_size, data=data),
    )


def set_weights(generator: random.Random, stated: session_pb2.DraftDistributions, rows: list[list[int]]) -> None:
    """Puts weights behind the ids of a sparse block, with as many high bytes as they need or with more."""
    wide_sizes = []
    for row in rows:
        fewest = max((place for place, weight in enumerate(row, 1) if weight > 256), default=0)
        wide_sizes.append(generator.choice((fewest, fewest, generator.randint(fewest, len(row)), len(row))))
    low = [(weight - 1) % 256 for row in rows for weight in row]
    high = [(weight - 1) // 256 for row, wide in zip(rows, wide_sizes, strict=True) for weight in row[:wide]]
    stated.data = stated.data[: len(low) * id_width(stated.vocab_size)] + bytes(low + high)
    stated.support_sizes[:] = map(len, rows)
    stated.wide_sizes[:] = wide_sizes


def sparse_sample(generator: random.Random, vocab_size: int, largest: int, smallest: int = 1) -> Sample:
    rows: list[Row] = []
    for _ in range(generator.randint(1, 5)):
        size = generator.randint(smallest, min(largest, vocab_size))
        ids = generator.sample(range(vocab_size), size)
        rows.append(dict(zip(ids, parted(generator, TOTAL, size), strict=True)))
    tokens = [generator.choice(list(row)) for row in rows]
    id_bytes = b"".join(token.to_bytes(id_width(vocab_size), "little") for row in rows for token in row)
    message = message_of(generator, SPARSE, vocab_size, tokens, id_bytes)
    set_weights(generator, message.distributions, [[int(weight) for weight in row.values()] for row in rows])
    return Sample(message.SerializeToString(), rows)


def dense_sample(generator: random.Random, vocab_size: int, encoding: int) -> Sample:
    rows: list[Row] = []
    data = b""
    for _ in range(generator.randint(1, 4)):
        weights = [generator.choice((0.0, generator.random(), generator.random() ** 4)) for _ in range(vocab_size - 1)]
        weights.insert(generator.randrange(vocab_size), 1.0)
        layout = f"<{vocab_size}{DENSE[encoding][0]}"
        part = struct.pack(layout, *(weight / math.fsum(weights) for weight in weights))
        rows.append(dict(enumerate(struct.unpack(layout, part))))
        data += part
    tokens = [generator.choice([token for token, weight in row.items() if weight > 0.0]) for row in rows]
    return Sample(message_of(generator, encoding, vocab_size, tokens, data).SerializeToString(), rows)


def dataless_sample(generator: random.Random, vocab_size: int, encoding: int) -> Sample:
    tokens = [generator.randrange(vocab_size) for _ in range(generator.randint(1, 6))]
    message = message_of(generator, encoding, vocab_size, tokens, b"")
    return Sample(message.SerializeToString(), [{token: TOTAL} for token in tokens])


def tree_sample(generator: random.Random, vocab_size: int, encoding: int) -> Sample:
    """Returns a tree, whose siblings are drawn without replacement if their distributions are sent."""
    parents = [generator.randint(-1, node - 1) for node in range(generator.randint(1, MAX_TREE_NODES))]
    tokens, rows = [0] * len(parents), list[Row]()
    for parent in sorted({*parents}):
        children = [node for node, own in enumerate(parents) if own == parent]
        children = children[:vocab_size]
        size = generator.randint(len(children), min(vocab_size, len(children) + 4))
        rows.append(dict(zip(generator.sample(range(vocab_size), size), parted(generator, TOTAL, size), strict=True)))
        for node, token in zip(children, generator.sample(list(rows[-1]), len(children)), strict=True):
            tokens[node] = token
    id_bytes = b"".join(token.to_bytes(id_width(vocab_size), "little") for row in rows for token in row)
    if encoding == NONE:
        rows, id_bytes = [{token: TOTAL} for token in tokens], b""
    message = message_of(generator, encoding, vocab_size, tokens, id_bytes)
    message.parent_indices.extend(parents)
    if encoding == SPARSE:
        set_weights(generator, message.distributions, [[int(weight) for weight in row.values()] for row in rows])
    return Sample(message.SerializeToString(), rows)


def samples_for(generator: random.Random, target: Target) -> list[Sample]:
    samples = []
    for vocab_size in target.sparse_vocab_sizes:
        samples += [sparse_sample(generator, vocab_size, largest) for largest in (1, 2, 4, 8, 16) for _ in range(5)]
        samples += [dataless_sample(generator, vocab_size, encoding) for encoding in (ONE_HOT, NONE) for _ in range(3)]
        encodings = (SPARSE, NONE) if vocab_size >= MAX_TREE_NODES else (NONE,)
        samples += [tree_sample(generator, vocab_size, encoding) for encoding in encodings for _ in range(4)]
    for vocab_size in target.dense_vocab_sizes:
        samples += [dense_sample(generator, vocab_size, encoding) for encoding in DENSE for _ in range(5)]
    if target.vocab_size > 256:
        samples += [sparse_sample(generator, target.vocab_size - 1, 1024, smallest=1024) for _ in range(5)]
    return samples


# Mutations of bytes


def flipped(generator: random.Random, wire: bytes, other: bytes = b"") -> bytes:
    changed = bytearray(wire)
    for _ in range(generator.randint(1, 3) if wire else 0):
        changed[generator.randrange(len(wire))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def spliced(generator: random.Random, wire: bytes, other: bytes) -> bytes:
    start, taken, length = generator.randrange(len(wire)), generator.randrange(len(other)), generator.randint(1, 12)
    return wire[:start] + other[taken : taken + length] + wire[start + generator.choice((0, length)) :]


def repeated(generator: random.Random, wire: bytes, other: bytes) -> bytes:
    start, length = generator.randrange(len(wire)), generator.randint(1, 30)
    return wire[: start + length] + wire[start:]


ByteMutation = Callable[[random.Random, bytes, bytes], bytes]
BYTE_MUTATIONS: list[ByteMutation] = [
    *(flipped, flipped, spliced, repeated),
    lambda generator, wire, other: wire[: generator.randrange(len(wire))],
    lambda generator, wire, other: wire + other,  # fields that are repeated grow, others are the second message's
]


# Mutations of fields


def change_data(generator: random.Random, message: session_pb2.DraftBlock) -> None:
    data = message.distributions.data
    longer, shorter = data + generator.randbytes(generator.randint(1, 4)), data[: -generator.randint(1, 4)]
    others = (longer, shorter, bytes(len(data)), b"\xff" * len(data), b"", flipped(generator, data))
    message.distributions.data = generator.choice((*others, others[-1]))


def change_ids(generator: random.Random, message: session_pb2.DraftBlock) -> None:
    """Copies or swaps ids of a sparse block, or puts one out of range."""
    stated = message.distributions
    width, total = id_width(stated.vocab_size), sum(stated.support_sizes)
    if not total:
        return
    data = bytearray(stated.data)
    first, second = (slice(place * width, place * width + width) for place in generator.choices(range(total), k=2))
    bound = min(stated.vocab_size + generator.choice((-1, 0, 1)), 2 ** (8 * width) - 1).to_bytes(width, "little")
    copied, swapped, beyond = (data[second], data[second]), (data[second], data[first]), (bound, data[second])
    data[first], data[second] = generator.choice((copied, swapped, beyond))
    stated.data = bytes(data)


def sparse_weights(message: session_pb2.DraftBlock) -> list[list[int]]:
    """Returns the weights of a valid block, none if it is not sparse."""
    stated = message.distributions
    rows = read_sparse(stated, len(stated.support_sizes)) if stated.encoding == SPARSE else None
    return [[int(weight) for weight in row.values()] for row in rows or ()]


def change_weights(generator: random.Random, message: session_pb2.DraftBlock) -> None:
    """Moves weight between entries of a sparse block, or adds some."""
    rows = sparse_weights(message)
    if not rows:
        return
    step = generator.choice((1, -1, 256, 1000, 65_535))
    for signed in (step, -step) if generator.random() < 0.6 else (step,):
        row = generator.choice(rows)
        place = generator.randrange(len(row))
        row[place] = (row[place] - 1 + signed) % TOTAL + 1
    set_weights(generator, message.distributions, rows)


def add_entry(generator: random.Random, message: session_pb2.DraftBlock) -> None:
    """Gives a part of a weight of a sparse block's last token to an id that it may not have had."""
    stated, rows = message.distributions, sparse_weights(message)
    if not rows:
        return
    width = id_width(stated.vocab_size)
    new = generator.randrange(stated.vocab_size).to_bytes(width, "little")
    stated.data = stated.data[: sum(stated.support_sizes) * width] + new
    rows[-1][-1:] = [max(1, rows[-1][-1] - 1), 1]
    set_weights(generator, stated, rows)


def change_number(generator: random.Random, message: session_pb2.DraftBlock) -> None:
    """Replaces one or two numbers of a dense block."""
    stated = message.distributions
    if stated.encoding not in DENSE:
        return
    letter, width, _ = DENSE[stated.encoding]
    data = bytearray(stated.data)
    numbers = (math.nan, math.inf, -math.inf, -0.0, 0.0, -1e-7, 1.0, 0.01, 6e-8, 65_504.0)
    for _ in range(generator.randint(1, 2)):
        place = generator.randrange(len(data) // width) * width
        struct.pack_into(f"<{letter}", data, place, generator.choice(numbers))
    stated.data = bytes(data)


def change_sizes(generator: random.Random, message: session_pb2.DraftBlock) -> None:
    sizes = generator.choice((message.distributions.support_sizes, message.distributions.wide_sizes))
    if not sizes or generator.random() < 0.2:
        sizes.append(generator.choice((0, 1, 2, 2**32 - 1)))
        return
    place, other, manner = generator.randrange(len(sizes)), generator.randrange(len(sizes)), generator.randrange(4)
    if manner == 0:
        del sizes[place]
    elif manner == 1:
        sizes[place] = generator.choice((0, 1, 1024, 1025, 65_536, 2**31, 2**32 - 1))
    else:  # the sum stays
        sizes[place] += 1
        sizes[other] = max(0, sizes[other] - 1)


def change_high_bytes(generator: random.Random, message: session_pb2.DraftBlock) -> None:
    """Gives or takes high bytes of a sparse block, so that the data is as long as its sizes say."""
    stated, sizes = message.distributions, message.distributions.wide_sizes
    if not sizes:
        return
    place, manner = generator.randrange(len(sizes)), generator.randrange(8)
    own, support = sizes[place], stated.support_sizes[place]
    end = len(stated.data) - sum(sizes[place + 1 :])
    new = max(0, generator.choice((0, own - 1, own + 1, support, support + 1, 257)))
    high = b""
    if manner == 0:
        del sizes[place]
    elif manner == 1:
        high = stated.data[end - own : end] + bytes(new)
        sizes.insert(place + 1, new)
    else:
        high = stated.data[end - own : end][:new].ljust(new, generator.choice((b"\x00", b"\x01")))
        sizes[place] = new
    stated.data = stated.data[: end - own] + high + stated.data[end:]


def change_vocabulary(generator: random.Random, message: session_pb2.DraftBlock) -> None:
    own = message.distributions.vocab_size
    choices = (0, 1, 2, 39, 41, 255, 256, 257, 65_536, 65_537, 200_001, 2**31, 2**32 - 1, own + 1, max(0, own - 1))
    message.distributions.vocab_size = generator.choice(choices)


def change_tokens(generator: random.Random, message: session_pb2.DraftBlock) -> None:
    tokens = message.token_ids
    manner = generator.randrange(40)
    if manner == 0:
        tokens.extend([0] * generator.choice((MAX_DRAFT_TOKENS, 5_000)))
    elif manner == 1 or not tokens:
        del tokens[:]
    elif manner < 6:
        del tokens[generator.randrange(len(tokens))]
    elif manner < 12:
        tokens.append(tokens[0])
    else:
        vocab_size = message.distributions.vocab_size
        new = (0, 1, vocab_size - 1, vocab_size, 2**31, 2**32 - 1, tokens[-1], generator.randrange(vocab_size))
        tokens[generator.randrange(len(tokens))] = generator.choice(new)


def change_encoding(generator: random.Random, message: session_pb2.DraftBlock) -> None:
    message.distributions.encoding = generator.choice((0, 1, 2, 3, 4, 5, 6, 99, -1))


def change_parents(generator: random.Random, message: session_pb2.DraftBlock) -> None:
    """Changes the shape of a tree, or makes one of a chain."""
    parents, num_tokens = message.parent_indices, len(message.token_ids)
    if not parents:
        parents.extend(range(-1, num_tokens - 1))
    place, manner = generator.randrange(len(parents)), generator.randrange(8)
    if manner == 0:
        del parents[place]
    elif manner == 1:
        parents.extend([-1] * generator.choice((1, 5_000)))
    elif manner == 2:
        del parents[:]
    else:
        parents[place] = generator.choice((-1, 0, place - 1, place, -2, -(2**31), 2**31 - 1))


def change_parts(generator: random.Random, message: session_pb2.DraftBlock) -> None:
    message.ClearField(generator.choice(("fence", "distributions", "token_ids", "parent_indices")))


FieldMutation = Callable[[random.Random, session_pb2.DraftBlock], None]
FIELD_MUTATIONS: list[FieldMutation] = [
    *(change_data, change_sizes, change_vocabulary, change_tokens, change_encoding),
    *(change_ids, change_ids, change_weights, change_weights, add_entry, change_number, change_number),
    *(change_sizes, change_high_bytes, change_high_bytes, change_parents),
]


def mutated(generator: random.Random, samples: list[Sample]) -> bytes:
    wire = generator.choice(samples).wire
    if generator.random() < 0.3:
        return generator.choice(BYTE_MUTATIONS)(generator, wire, generator.choice(samples).wire)
    message = session_pb2.DraftBlock.FromString(wire)
    mutation = change_parts if generator.random() < 0.02 else generator.choice(FIELD_MUTATIONS)
    mutation(generator, message)
    return message.SerializeToString()


# The run


class Sent(NamedTuple):
    """A message and what it means."""

    wire: bytes
    message: session_pb2.DraftBlock
    rows: list[Row] | None


def batch_of(generator: random.Random, samples: list[Sample], target: Target, size: int, counts: Counts) -> list[Sent]:
    """Returns messages that are decoded together."""
    batch = []
    for _ in range(size):
        is_valid = generator.random() < VALID_SHARE
        counts.valid += is_valid
        sample = generator.choice(samples)
        wire = sample.wire if is_valid else mutated(generator, samples)
        try:
            message = session_pb2.DraftBlock.FromString(wire)
        except DecodeError:
            counts.refused[TRANSPORT] += 1
            continue
        batch.append(Sent(wire, message, sample.rows if is_valid else read(message, target.vocab_size)))
    return batch


def check(batch: list[Sent], target: Target, counts: Counts) -> None:
    """Decodes a batch.

    Raises:
        DecodingFaultError: one of its messages was not decoded as the format says.
    """
    try:
        limits = (target.vocab_size, MAX_DRAFT_TOKENS, MAX_TREE_NODES)
        received = messages.blocks_from_proto([sent.message for sent in batch], 1, *limits)
    except Exception as error:
        wires = " ".join(sent.wire.hex() for sent in batch)
        raise DecodingFaultError(f"{type(error).__name__}: {error}; target of {target.vocab_size}: {wires}") from error
    for sent, block in zip(batch, received, strict=True):
        problem = difference(block, sent.rows, target.vocab_size)
        parents = () if block.tree is None else block.tree.parents
        if not isinstance(block.draft, BlockViolationError) and parents != tuple(sent.message.parent_indices):
            problem = "another shape"
        if block.fence.session_id != sent.message.fence.session_id:
            problem = "in another message's place"
        if problem is not None:
            raise DecodingFaultError(f"{problem}; target of {target.vocab_size}: {sent.wire.hex()}")
        if isinstance(block.draft, BlockViolationError):
            counts.refused[block.draft.violation.value] += 1
        else:
            counts.accepted += 1


def run(num_messages: int, seed: int) -> Counts:
    """Decodes so many messages.

    Raises:
        DecodingFaultError: one of them was not decoded as the format says.
    """
    generator, counts = random.Random(seed), Counts()
    samples = {target: samples_for(generator, target) for target in TARGETS}
    while counts.messages < num_messages:
        target = generator.choice(TARGETS)
        size = min(BATCH, num_messages - counts.messages)
        check(batch_of(generator, samples[target], target, size, counts), target, counts)
        counts.messages += size
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Feeds broken draft blocks to what decodes them.")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gguf", type=int, metavar="FILES", help="broken GGUF files in the place of messages")
    options = parser.parse_args()
    started_at = time.perf_counter()
    if options.gguf is not None:
        for reason, number in gguf_fuzz.run(options.gguf, options.seed).most_common():
            print(f"{number:>7,} {reason}")
        print(f"seconds  {time.perf_counter() - started_at:.1f}")
        return
    counts = run(options.messages, options.seed)
    seconds = time.perf_counter() - started_at
    print(f"messages {counts.messages:,}, of these unchanged {counts.valid:,}")
    print(f"accepted {counts.accepted:,}")
    for reason, number in counts.refused.most_common():
        print(f"refused  {number:,} {reason}")
    print(f"seconds  {seconds:.1f}, {counts.messages / seconds:,.0f} messages/s")


if __name__ == "__main__":
    main()
