"""Decoders compute forward passes: our own code for the Llama family, transformers' for all other models."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftwire.errors import InvalidRequestError
from draftwire.models.decoder import Decoder
from draftwire.models.lean_decoder import LeanDecoder, why_not_lean
from draftwire.models.lean_model import LeanModel
from draftwire.models.paged_attention import IMPLEMENTATION, PackedStep, paged_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DECODERS = ("auto", "lean", "transformers")


class TransformersDecoder:
    """Decoder for any causal language model of transformers whose attention can be replaced."""

    def __init__(self, model: "PreTrainedModel") -> None:
        """Takes over a model in evaluation mode, on its device, and replaces its attention."""
        from transformers import AttentionInterface

        AttentionInterface.register(IMPLEMENTATION, paged_attention)
        model.set_attn_implementation(IMPLEMENTATION)
        self._model: Any = model
        self.device = model.device
        self.vocab_size = int(self._model.get_output_embeddings().weight.shape[0])
        config = self._model.config.get_text_config()
        self.num_layers, self.hidden_size = int(config.num_hidden_layers), int(config.hidden_size)

    def logits(self, token_ids: Tensor, step: PackedStep, kept: Tensor) -> Tensor:
        """Returns the logits of the kept tokens, computed by the model's own layers."""
        tap = step.storage.tap
        with self._tapped(() if tap is None else tap.layers) as states:
            output = self._model(
                input_ids=token_ids.unsqueeze(0),
                position_ids=step.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=kept,
                packed_step=step,
            )
        if tap is not None:
            tap.take(states, step.slots)
        logits: Tensor = output.logits[0]
        return logits

    @contextmanager
    def _tapped(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """Collects the hidden states, `[num_tokens, hidden]` by id, of the pass that is run in the context.

        Raises:
            InvalidRequestError: the model keeps its layers in an unexpected place.
        """
        states: dict[int, Tensor] = {}
        if not taps:
            yield states
            return
        lists = (each for each in self._model.modules() if isinstance(each, torch.nn.ModuleList))
        layers: Any = next((each for each in lists if len(each) == self.num_layers), None)
        if layers is None:
            raise InvalidRequestError(f"hidden states of {self._model.name_or_path} cannot be read: no list of layers")

        def keep_input(index: int, _: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            states[index] = (inputs[0] if inputs else named["hidden_states"])[0].clone()

        def keep_output(_: Any, _inputs: Any, output: Any) -> None:
            states[self.num_layers] = (output if isinstance(output, Tensor) else output[0])[0].clone()

        with ExitStack() as hooks:
            for index in taps:
                if index < self.num_layers:
                    hook = layers[index].register_forward_pre_hook(partial(keep_input, index), with_kwargs=True)
                else:
                    hook = layers[-1].register_forward_hook(keep_output)
                hooks.callback(hook.remove)
            yield states


def check_decoder(kind: str) -> None:
    """Checks that a decoder is one of `DECODERS`.

    Raises:
        InvalidRequestError: the decoder is unknown.
    """
    if kind not in DECODERS:
        raise InvalidRequestError(f"decoder must be one of {', '.join(DECODERS)}, not {kind!r}")


def decoder_of(model: "PreTrainedModel | LeanModel", kind: str = "auto", consumes: bool = False) -> Decoder:
    """Returns a decoder for a model.

    Args:
        model: in evaluation mode, on its device.
        kind: one of `DECODERS`; "auto" is the lean decoder for models that it supports.
        consumes: whether the model is not used elsewhere, so that its weights may be rearranged without a second copy.

    Raises:
        InvalidRequestError: an unknown kind, or a model that the lean decoder does not support.
    """
    check_decoder(kind)
    reason = why_not_lean(model)
    if kind == "lean" and reason:
        raise InvalidRequestError(f"the lean decoder cannot run {model.name_or_path}: {reason}")
    if kind != "transformers" and not reason:
        return LeanDecoder(model, consumes)
    assert not isinstance(model, LeanModel), "it is read for the lean decoder alone"
    return TransformersDecoder(model)
