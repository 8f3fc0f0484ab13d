"""Loads heads from folders, with the tensors that they share with their target."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from draftwire.errors import InvalidRequestError
from draftwire.models.configuration import config_of
from draftwire.models.folder import CONFIG, check_folder, json_of, weights_files
from draftwire.options.heads.draft_head import DraftHead, HeadConfig
from draftwire.options.heads.eagle_head import EagleHead
from draftwire.options.heads.head_formats import TargetFacts, known_names, required_shapes, shape_of
from draftwire.options.heads.head_names import WITH_LAYERS
from draftwire.options.heads.head_parts import Fusion, fusion_names
from draftwire.options.heads.head_shape import (
    DRAFT_IDS,
    EMBEDDING,
    GATE_UP,
    OUTPUT,
    QUERIES_KEYS_VALUES,
    TARGET_NORM,
    HeadShape,
    Tensors,
)
from draftwire.options.heads.mlp_heads import MlpHead

DRAFTED = "t2d"
"""Name of the tensor that states for each of the target's ids whether it is drafted."""
UNUSED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
"""Ends of names of tensors that checkpoints hold and heads do not need."""
OWN_TENSORS = {EMBEDDING: "embed_tokens.weight", OUTPUT: "lm_head.weight", TARGET_NORM: "norm.weight"}
"""Names in the target of the tensors that a head may share with it, without their prefix."""
PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")


def read_shape(folder: Path, target: Path) -> HeadShape:
    """Reads the shape of a head, and checks that it fits its target. Reads no weights.

    Raises:
        InvalidRequestError: a file is missing or cannot be read, the head is of a kind or form that is not supported,
            or it is for another hidden size, other layers or another vocabulary; the message names it.
    """
    check_folder(target)
    path = folder / CONFIG
    if not path.is_file():
        raise InvalidRequestError(f"{folder} has no {path.name}, the configuration of a head")
    shape = shape_of(str(folder), json_of(path), TargetFacts.of(config_of(target)))
    _check_strings(folder, target)
    return shape


def load_head(
    folder: Path, target: Path, cache_tokens: int, dtype: torch.dtype | None = None, device: str = "cpu"
) -> DraftHead:
    """Loads a head. No code of the checkpoint is run. Runs on the torch thread.

    Args:
        folder: of the head.
        target: folder of the target model, whose embeddings, output layer and final norm it may share.
        cache_tokens: capacity of the head's cache, tokens of all sequences together.
        dtype: of the weights; None is the checkpoint's own.
        device: a torch device.

    Raises:
        InvalidRequestError: as for `read_shape`; or tensors are missing, of another shape, or unknown.
    """
    shape = read_shape(folder, target)
    own = _own_tensors(folder, shape)
    tensors = {name: tensor for name, tensor in own.items() if not name.endswith(UNUSED)}
    _set_draft_ids(folder, shape, tensors)
    required = required_shapes(shape)
    outputs = [f"heads.{depth}.output.weight" for depth in range(shape.config.most_tokens or 0)]
    if outputs and outputs[0] not in tensors:
        outputs = [OUTPUT]
    required |= dict.fromkeys(outputs, (shape.config.draft_vocab_size, shape.config.hidden_size))
    tensors |= _shared_tensors(shape, target, required.keys() - tensors.keys(), tensors.get(DRAFT_IDS))
    _check_tensors(folder, shape, tensors, required)
    dtype = dtype or own[next(name for name, tensor in own.items() if tensor.is_floating_point())].dtype
    placed = {
        name: tensor.to(device, dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
        if name in required or name.endswith(".bias")
    }
    return build_head(shape, placed, cache_tokens)


@dataclass(frozen=True, slots=True)
class LoadedFusion:
    """The part of a head that a verifier needs where the head drafts elsewhere."""

    config: HeadConfig
    fuse: Fusion
    fingerprint: bytes
    """SHA-256 of taps, epsilon and tensors of `fuse`: heads with the same one read the same features."""


def load_fusion(
    folder: Path, target: Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> LoadedFusion:
    """Loads the fusion of a head's features, and nothing else of it.

    Raises:
        InvalidRequestError: as for `load_head`, of these tensors.
    """
    shape = read_shape(folder, target)
    wanted = fusion_names(shape)
    tensors = {name: tensor for name, tensor in _own_tensors(folder, shape).items() if name in wanted}
    required = {name: size for name, size in required_shapes(shape).items() if name in wanted}
    tensors |= _shared_tensors(shape, target, required.keys() - tensors.keys(), None)
    _check_tensors(folder, shape, tensors, required)
    digest = hashlib.sha256(repr((shape.config.taps, shape.fusion_epsilon)).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(np.asarray(tensor.contiguous().view(torch.uint8)).tobytes())
    placed = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    return LoadedFusion(shape.config, Fusion(shape, placed), digest.digest())


def build_head(shape: HeadShape, tensors: Tensors, cache_tokens: int) -> DraftHead:
    """Builds a head of tensors that are all of one type and on one device, perhaps meta."""
    if shape.config.kind in WITH_LAYERS:
        return EagleHead(shape, tensors, cache_tokens)
    return MlpHead(shape, tensors, cache_tokens)


def _check_strings(folder: Path, target: Path) -> None:
    """Compares the vocabularies, if the head has one of its own."""
    files = [each / "tokenizer.json" for each in (folder, target)]
    if not all(file.is_file() for file in files):
        return
    own, others = (Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True) for file in files)
    if own != others:
        differing = {token: number for token, number in (own | others).items() if own.get(token) != others.get(token)}
        token = min(differing, key=lambda each: differing[each])
        raise InvalidRequestError(f"{folder} is for another vocabulary than {target}: token {token!r} differs")


def _own_tensors(folder: Path, shape: HeadShape) -> Tensors:
    """Reads the tensors of a head's folder, by the names that they have here: from safetensors files those of the head
    alone, which may lie among its target's; else from pickled files, of which no code is run.
    """
    if list(folder.glob("*.safetensors")):
        places = _places_in(folder)
        return {known: _tensor_in(places[name], name) for name, known in known_names(shape, list(places)).items()}
    tensors: Tensors = {}
    for path in sorted(path for pattern in ("*.bin", "*.pt") for path in folder.glob(pattern)):
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # pickles fail in many ways
            raise InvalidRequestError(f"{path} cannot be read as tensors alone: {error}") from error
        if not isinstance(loaded, Mapping) or not all(isinstance(each, Tensor) for each in loaded.values()):
            raise InvalidRequestError(f"{path} holds no tensors by name")
        tensors |= loaded
    if not tensors:
        raise InvalidRequestError(f"{folder} has no weights: model.safetensors is missing")
    return {known: tensors[name] for name, known in known_names(shape, list(tensors)).items()}


def _places_in(folder: Path) -> dict[str, Path]:
    """Returns the safetensors file of each tensor, by its name there."""
    places: dict[str, Path] = {}
    for path in weights_files(folder):
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    return places


def _tensor_in(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _set_draft_ids(folder: Path, shape: HeadShape, tensors: Tensors) -> None:
    """Checks `d2t` and `t2d` against each other, and computes the first from the second if it is missing."""
    config = shape.config
    drafted, offsets = tensors.pop(DRAFTED, None), tensors.get(DRAFT_IDS)
    if config.draft_vocab_size == config.vocab_size:
        tensors.pop(DRAFT_IDS, None)
        return
    if offsets is None and drafted is not None:
        ids = drafted.bool().nonzero().flatten()
        offsets = ids - torch.arange(len(ids))
    if offsets is None:
        raise InvalidRequestError(
            f"{folder} drafts {config.draft_vocab_size:,} of {config.vocab_size:,} tokens, and has neither "
            f"{DRAFT_IDS} nor {DRAFTED}, which say which"
        )
    ids = torch.arange(len(offsets)) + offsets.long()
    in_range = len(ids) == config.draft_vocab_size and bool(((ids >= 0) & (ids < config.vocab_size)).all())
    if not in_range or len(ids.unique()) < len(ids):
        raise InvalidRequestError(f"{DRAFT_IDS} of {folder} does not name {config.draft_vocab_size:,} different tokens")
    if drafted is not None and not (drafted.bool()[ids].all() and int(drafted.sum()) == len(ids)):
        raise InvalidRequestError(f"{DRAFT_IDS} and {DRAFTED} of {folder} name different tokens")
    tensors[DRAFT_IDS] = offsets.long()


def _shared_tensors(shape: HeadShape, target: Path, missing: Iterable[str], offsets: Tensor | None) -> Tensors:
    """Reads the missing tensors that a head may share with its target, each by itself."""
    wanted = [name for name in missing if name in OWN_TENSORS]
    places = _places_in(target) if wanted else {}
    found: Tensors = {}
    for name in wanted:
        names = (OWN_TENSORS[name], EMBEDDING) if name == OUTPUT else (OWN_TENSORS[name],)  # it may be tied
        known = next((prefix + own for own in names for prefix in PREFIXES if prefix + own in places), None)
        if known is not None:
            found[name] = _tensor_in(places[known], known)
    if OUTPUT in found and shape.config.draft_vocab_size < len(found[OUTPUT]) and offsets is not None:
        found[OUTPUT] = found[OUTPUT][torch.arange(len(offsets)) + offsets]
    return found


def _check_tensors(folder: Path, shape: HeadShape, tensors: Tensors, required: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(required.keys() - tensors.keys())
    if missing:
        raise InvalidRequestError(f"{folder} lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}")
    wanted = {**required, **_optional_biases(shape, required)}
    unknown = sorted(tensors.keys() - wanted.keys() - {EMBEDDING, OUTPUT})
    if unknown:
        raise InvalidRequestError(f"{folder} holds {unknown[0]}, which heads of its kind do not have")
    for name in sorted(wanted.keys() & tensors.keys()):
        if tuple(tensors[name].shape) != wanted[name]:
            found = " x ".join(map(str, tensors[name].shape))
            raise InvalidRequestError(f"{name} of {folder} is {found}, not {' x '.join(map(str, wanted[name]))}")
    for place in range(shape.layers.num_hidden_layers if shape.layers is not None else 0):
        for group in (QUERIES_KEYS_VALUES, GATE_UP):
            biases = [f"layers.{place}.{part}.bias" for part in group]
            held = [name for name in biases if name in tensors]
            if held and len(held) < len(biases):
                lacking = next(name for name in biases if name not in held)
                raise InvalidRequestError(f"{folder} holds {held[0]}, and lacks {lacking}, which is read with it")


def _optional_biases(shape: HeadShape, required: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the biases that a head may have: of its matrices, but the embeddings, and the output layer
    of heads with decoder layers.
    """
    without = {EMBEDDING, OUTPUT} if shape.config.kind in WITH_LAYERS else {EMBEDDING}
    return {
        f"{name.removesuffix('.weight')}.bias": size[:1]
        for name, size in required.items()
        if len(size) == 2 and name not in without
    }
