"""The tensors of a KV cache, which its block manager (`KvCache`) knows nothing of."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from draftwire.models.kv_cache import BLOCK_SIZE, NULL_BLOCK

HEADS_FIRST_BYTES = 1024
"""Keys of a token and a layer that take less are gathered faster with all heads at once."""


class Tap(Protocol):
    """Takes the hidden states of a pass, those before some layers. A decoder finds it in the storage of its step."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Ids of the layers, in the order of the features, each once; their number stands for behind the last one."""

    def take(self, states: Mapping[int, Tensor], slots: Tensor) -> None:
        """Takes the hidden states of a pass, once all layers have run; on the torch thread.

        Args:
            states: `[num_tokens, hidden]` by id, those of a pass alone: nobody writes to them any more.
            slots: `[num_tokens] int64`: slots of the tokens. One that occurs several times has the same states in each.
        """


class StoredFeatures(Tap, Protocol):
    """A tap whose features of each token are stored by slot, as one more layer."""

    rows: Tensor | None
    """`[num_slots, kept]`; None before the first pass. Slots that were never written are undefined."""

    @property
    def token_bytes(self) -> int:
        """Bytes that are kept of a token; 0 before the first pass."""

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies features between slots, `[count] int64` each."""


class KvStorage:
    """The tensors of a `KvCache`: for each layer `[kv_heads, num_slots, head_dim]` keys and values.

    On a CPU they are laid out in this order, so that the keys of a head are read one after the other; on other devices,
    and where they are small, by slots, whose heads are gathered together.
    """

    def __init__(
        self,
        num_slots: int,
        stacks: Sequence[Sequence[int]] = (),
        tap: Tap | None = None,
        features: StoredFeatures | None = None,
    ) -> None:
        """Allocates nothing yet: the first step that reaches a layer determines its shape.

        Args:
            num_slots: capacity in tokens.
            stacks: layers that are also attended to together; their tensors are contiguous.
            tap: takes the hidden states of all passes; None if nobody reads them.
            features: a tap that is part of what is stored of a token; None if there is none.
        """
        self.tap = tap if features is None else features
        self.features = features
        self._num_slots = num_slots
        self._stacks = {index: tuple(stack) for stack in stacks for index in stack}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._stacked: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self.token_bytes = 0
        """Bytes that a layer stores of a token; 0 before the first step."""

    @property
    def token_bytes_of_layers(self) -> list[int]:
        """Bytes that each layer stores of a token; of the layers that a step has reached. The last is the features',
        if they are stored.
        """
        of_layers = [sum(tensor.nbytes // self._num_slots for tensor in layer) for layer in self._layers.values()]
        return [*of_layers, self.features.token_bytes] if self.features is not None else of_layers

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values. Slots that were never written are undefined, except the null block: 0.

        Args:
            index: of the layer.
            key: `[tokens, kv_heads, head_dim]`, an example of the tensors to store.
            value: likewise; its last dimension may differ.
        """
        if index not in self._layers:
            stack = self._stacks.get(index, (index,))
            keys, values = self._allocate(len(stack), key), self._allocate(len(stack), value)
            self._stacked[stack] = keys, values
            self._layers.update(zip(stack, zip(keys, values, strict=True), strict=True))
            self.token_bytes = key[0].nbytes + value[0].nbytes
        return self._layers[index]

    def stack(self, layers: tuple[int, ...], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the layers of a stack, `[layers, kv_heads, num_slots, head_dim]`; see `layer`."""
        if layers not in self._stacked:
            self.layer(layers[0], key, value)
        return self._stacked[layers]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies keys, values and features between slots, `[count] int64` each, in all layers."""
        for layer in self._layers.values():
            for tensor in layer:
                tensor.index_copy_(1, targets, tensor.index_select(1, sources))  # two kernels
        if self.features is not None:
            self.features.copy(sources, targets)

    def _allocate(self, num_layers: int, new: Tensor) -> Tensor:
        _, heads, size = new.shape
        # On a CPU, memory is committed on first write.
        if new.device.type == "cpu" and new[0].nbytes >= HEADS_FIRST_BYTES:
            tensor = new.new_empty(num_layers, heads, self._num_slots, size)
        else:
            tensor = new.new_empty(num_layers, self._num_slots, heads, size).transpose(1, 2)
        tensor[:, :, NULL_BLOCK * BLOCK_SIZE : (NULL_BLOCK + 1) * BLOCK_SIZE] = 0.0
        return tensor
