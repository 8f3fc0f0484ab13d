"""Loads this rank's shard of a tensor-parallel model, reading only the shard from the files.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3: projections that read a layer's whole input
are divided by rows of their weights, projections that read the divided result are divided by columns.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar

from draftwire.errors import InvalidRequestError
from draftwire.models.card import ModelCard, path_of
from draftwire.models.configuration import config_of
from draftwire.models.decoder import Decoder
from draftwire.models.decoders import check_decoder
from draftwire.models.lean_decoder import LeanDecoder, why_not_lean
from draftwire.models.loading import FINGERPRINT_ENTRIES, card_of, dtype_on_cpu, on_meta
from draftwire.models.parallel.process_group import ProcessGroup
from draftwire.models.parallel.spread_decoder import (
    BY_INNER,
    BY_KEY_HEAD,
    BY_QUERY_HEAD,
    EMBEDDING,
    HEAD,
    SUMMED,
    SpreadTransformersDecoder,
    why_not_spread,
)
from draftwire.models.parallel.tensor_parallel import check_divides
from draftwire.models.quantised import refuse_quantised
from draftwire.models.unsupported import check_layers

LOADING_SECONDS = 3600.0
"""Timeout of waiting for the slowest rank to load."""

Progress = Callable[[int, int], None]
"""Called with the bytes of weights that this rank has read, and their total."""


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """A rank's shard of a model and the card of the whole model."""

    decoder: Decoder
    card: ModelCard
    """Card, without the weights' fingerprint on ranks other than 0: only rank 0 computes it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a weight: entries `start` to `stop` along a dimension, padded with zeros to `size`."""

    dimension: int
    start: int
    stop: int
    size: int

    @classmethod
    def of(cls, name: str, shape: Sequence[int], config: Any, group: ProcessGroup) -> "Part":
        """Returns a rank's part of the weight `name`, which has `shape` as a whole."""
        module, _, kind = name.rpartition(".")
        module = module.rpartition(".")[2]
        if module in BY_QUERY_HEAD:
            return cls.share(0, shape, group.rank, group.size)
        if module in BY_KEY_HEAD:  # a key head is copied to all ranks whose query heads share it
            owners = min(group.size, config.num_key_value_heads)
            return cls.share(0, shape, group.rank * owners // group.size, owners)
        if module in BY_INNER:
            return cls.share(0, shape, group.rank, group.size)
        if module in SUMMED and kind == "weight":
            return cls.share(1, shape, group.rank, group.size)
        if module in SUMMED and group.rank > 0:
            return cls(0, 0, 0, shape[0])  # the all-reduce must add each bias once
        if name == HEAD:
            size = -(-shape[0] // group.size)
            start = min(group.rank * size, shape[0])
            return cls(0, start, min(start + size, shape[0]), size)
        return cls(0, 0, shape[0], shape[0])

    @classmethod
    def share(cls, dimension: int, shape: Sequence[int], index: int, count: int) -> "Part":
        """Returns one of `count` equal parts."""
        size = shape[dimension] // count
        return cls(dimension, index * size, (index + 1) * size, size)

    def taken_from(self, whole: Any) -> Tensor:
        """Slices the part from a tensor, or reads it from a tensor in a file, without the zeros."""
        own: Tensor = whole[self.start : self.stop] if self.dimension == 0 else whole[:, self.start : self.stop]
        return own

    def placed(self, own: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a copy of the result of `taken_from`, padded with zeros."""
        shape = list(own.shape)
        shape[self.dimension] = self.size
        result = torch.empty(shape, dtype=dtype, device=device)
        result.narrow(self.dimension, 0, self.stop - self.start).copy_(own)
        result.narrow(self.dimension, self.stop - self.start, self.size - (self.stop - self.start)).zero_()
        return result


class Checkpoint:
    """The weights in a model's safetensors files, readable by slices. A context manager."""

    def __init__(self, files: Iterable[str]) -> None:
        """Opens the files.

        Raises:
            OSError: one cannot be read.
        """
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        for path in files:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._files.update(dict.fromkeys(file.keys(), file))

    @classmethod
    def find(cls, name: str, revision: str | None) -> "Checkpoint":
        """Opens a model's files by folder or name on the hub.

        Raises:
            InvalidRequestError: there are none.
            OSError: one cannot be read.
        """
        where: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
        single = cached_file(name, SAFE_WEIGHTS_NAME, **where)
        if single is not None:
            return cls([single])
        index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **where)
        if index is None:
            raise InvalidRequestError(f"{name} has no weights in safetensors files")
        files = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
        if any(Path(file).name != file for file in files):
            raise InvalidRequestError(f"the index of {name} names files outside its folder")
        return cls([str(cached_file(name, file, revision=revision)) for file in files])

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def weight(self, name: str, shape: Sequence[int]) -> Any:
        """Returns a lazy tensor in a file, whose slices are read on access.

        Raises:
            InvalidRequestError: there is none of that name and shape.
        """
        if name not in self._files:
            raise InvalidRequestError(f"the checkpoint has no weight of the name {name}")
        stored = self._files[name].get_slice(name)
        if list(stored.get_shape()) != list(shape):
            raise InvalidRequestError(f"{name} has the shape {stored.get_shape()} in the checkpoint, not {list(shape)}")
        return stored

    def ties_head(self, config: Any) -> bool:
        """Whether a model's head is tied to its embedding and not stored separately."""
        return bool(config.tie_word_embeddings) and HEAD not in self._files

    def dtype(self) -> torch.dtype | None:
        """Returns the dtype of the first weight that is not an integer tensor."""
        dtypes = (file.get_slice(name)[:0].dtype for name, file in self._files.items())
        return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model of a group, the same on all ranks."""

    name: str
    """Folder, or name on the model hub."""
    dtype: str
    """Type of the weights, as for `load_model`."""
    revision: str | None = None
    """Commit or branch on the hub."""


def load_parallel_target(
    source: ModelSource, group: ProcessGroup, decoder: str = "auto", on_progress: Progress | None = None
) -> LoadedShard:
    """Loads this rank's shard of a model onto the group's device. Called on all ranks with the same arguments.
    `on_progress` is called on this thread while weights are read.

    Returns when all ranks have loaded their shards. A rank that fails leaves the group, so that no other rank waits.

    Raises:
        InvalidRequestError: as `load_model`; or the model cannot be sharded over this many processes, or not at all.
        OSError: the files cannot be read.
        UnavailableError: another rank is lost, or could not load its part.
    """
    try:
        path = path_of(source.name, source.dtype)
        shard = _load(replace(source, name=path), group, decoder, on_progress or (lambda *_: None))
        group.meet(LOADING_SECONDS)
        return shard
    except BaseException as error:
        group.break_off(f"its part of {source.name} was not loaded: {type(error).__name__}")
        raise


def _dtype_of(
    source: ModelSource, config: Any, whole: Any, checkpoint: Checkpoint, device: torch.device
) -> torch.dtype:
    """Returns the dtype of the weights, chosen as by `load_model`."""
    if source.dtype == "auto" and device.type == "cpu":
        return dtype_on_cpu(whole)
    named = getattr(config, "dtype", None) if source.dtype == "auto" else getattr(torch, source.dtype)
    found = named or checkpoint.dtype()
    if not isinstance(found, torch.dtype):
        raise InvalidRequestError(f"{source.name} does not say of what type its weights are")
    return found


def _load(source: ModelSource, group: ProcessGroup, decoder: str, on_progress: Progress) -> LoadedShard:
    check_decoder(decoder)
    disable_progress_bar()  # would write into the log
    config = config_of(source.name, source.revision)
    refuse_quantised(source.name, config)
    whole: Any = on_meta(config)
    check_layers(source.name, whole)
    reason = why_not_lean(whole)
    if decoder == "lean" and reason:
        raise InvalidRequestError(f"the lean decoder cannot run {source.name}: {reason}")
    is_lean = decoder != "transformers" and not reason
    obstacle = "" if is_lean else why_not_spread(whole)
    if obstacle:
        raise InvalidRequestError(f"{source.name} cannot be spread over processes: {obstacle}")
    check_divides(config, group.size)
    with Checkpoint.find(source.name, source.revision) as checkpoint:
        whole.to(_dtype_of(source, config, whole, checkpoint, group.device))
        card = _card(source, whole, checkpoint, group.rank)
        part = _part_of(whole, checkpoint, group, on_progress)
    if is_lean:
        return LoadedShard(LeanDecoder(part, consumes=True, group=group), card)
    return LoadedShard(SpreadTransformersDecoder(part, group, card.description.vocab_size), card)


def _part_of(whole: Any, checkpoint: Checkpoint, group: ProcessGroup, on_progress: Progress) -> PreTrainedModel:
    """Returns this rank's shard of a model, as a smaller model of the same architecture.

    Raises:
        InvalidRequestError: the architecture or the checkpoint has unexpected weights.
    """
    config = copy.deepcopy(whole.config)
    heads = config.num_attention_heads
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    config.num_attention_heads = heads // group.size
    config.num_key_value_heads = max(1, config.num_key_value_heads // group.size)
    config.intermediate_size //= group.size
    config.tie_word_embeddings = False
    config.dtype = whole.dtype
    part: Any = on_meta(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.state_dict().items()}
    parts = {name: Part.of(name, shape, whole.config, group) for name, shape in shapes.items()}
    part.lm_head = torch.nn.Linear(config.hidden_size, parts[HEAD].size, bias=False, device="meta")
    is_tied = checkpoint.ties_head(whole.config)
    stored = {
        name: parts[name].taken_from(checkpoint.weight(name, shape))
        for name, shape in shapes.items()
        if name != HEAD or not is_tied
    }
    state = _read(stored, parts, whole.dtype, group.device, on_progress)
    if is_tied:
        head, embedding = parts[HEAD], state[EMBEDDING]
        rows = head.taken_from(embedding)
        state[HEAD] = rows if len(rows) == head.size else head.placed(rows, embedding.dtype, embedding.device)
    odd = [name for name, weight in part.state_dict().items() if state[name].shape != weight.shape]
    if odd:
        raise InvalidRequestError(
            f"models of type {config.model_type} cannot be spread over processes: {odd[0]} is odd"
        )
    _make_buffers(part, group.device)  # before the weights are assigned: it would initialise them too
    part.load_state_dict(state, assign=True)
    model: PreTrainedModel = part.eval()
    return model


def _make_buffers(part: Any, device: torch.device) -> None:
    """Computes a model's buffers, such as the frequencies of position embeddings.

    Raises:
        InvalidRequestError: transformers cannot initialise them.
    """
    for module in part.modules():
        tables = dict(module.named_buffers(recurse=False))
        for name, table in tables.items():
            setattr(module, name, torch.full_like(table, torch.nan, device=device))
        if tables:
            part._init_weights(module)
    unknown = [name for name, table in part.named_buffers() if table.isnan().any()]
    if unknown:
        raise InvalidRequestError(f"models of type {part.config.model_type} cannot be spread: {unknown[0]} is unknown")


def _read(
    stored: dict[str, Tensor], parts: dict[str, Part], dtype: torch.dtype, device: torch.device, on_progress: Progress
) -> dict[str, Tensor]:
    """Reads parts of weights from their files and places them on the device."""
    total = sum(own.nbytes for own in stored.values())
    num_read = 0
    state: dict[str, Tensor] = {}
    for name, own in stored.items():
        state[name] = parts[name].placed(own, dtype, device)
        num_read += own.nbytes
        on_progress(num_read, total)
    return state


def _card(source: ModelSource, whole: Any, checkpoint: Checkpoint, rank: int) -> ModelCard:
    """Returns the card that `load_model` would return for the whole model."""
    with suppress(OSError):  # without the file, the model's own default stays
        whole.generation_config = GenerationConfig.from_pretrained(source.name, revision=source.revision or "main")
    fingerprint = _fingerprint(whole, checkpoint) if rank == 0 else b""
    return card_of(whole, source.name, source.name, source.revision, fingerprint)


def _fingerprint(whole: Any, checkpoint: Checkpoint) -> bytes:
    """Returns the `weights_fingerprint` of the whole model, reading only the entries that it hashes."""
    digest = hashlib.sha256()
    aliases = {HEAD: EMBEDDING} if checkpoint.ties_head(whole.config) else {}
    for name, tensor in sorted(whole.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        stored = checkpoint.weight(aliases.get(name, name), tensor.shape)
        count = tensor.numel()
        places = torch.linspace(0, max(0, count - 1), min(FINGERPRINT_ENTRIES, count), dtype=torch.float64)
        entries = [
            stored[tuple(slice(at, at + 1) for at in map(int, index))].flatten()
            for index in zip(*np.unravel_index(places.to(torch.int64).numpy(), tensor.shape), strict=True)
        ]
        digest.update(torch.cat(entries).to(tensor.dtype).view(torch.uint8).numpy().tobytes())
    return digest.digest()
