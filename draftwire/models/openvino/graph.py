"""The graph of a model of the Llama family, with the paged attention of OpenVINO's CPU plugin.

Shapes: T new tokens of B texts, one text after the other, of which K have their logits returned; N blocks.

Inputs: `input_ids` and `position_ids` i64 `[T]`; `kept` i64 `[K]`; `past_lens` i32 `[B]`, the tokens of each text that
are in the cache; `subsequence_begins` i32 `[B + 1]`; `block_indices` i32 `[N]`, and `block_indices_begins` i32
`[B + 1]`, their ranges; `max_context_len` i32; `qq_bias` u8 and `qq_bias_begins` i32 `[B + 1]`: for each text with a
tree, `[n, n]`, whether a new token sees another one; empty where no text has a tree. `key_cache.I` and `value_cache.I`
of layer I: `[blocks, kv_heads, 32, head_dim]`.

Outputs: `logits` f32 `[K, vocab]`; where layers are tapped, `features` f32 `[T, taps * hidden]`.

The plugin finds norms, rotations and packed products in these operations by their patterns, so that they are written as
it expects them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from draftwire.models.lean_model import LeanModel, head_size
from draftwire.models.openvino.kept_weights import KeptWeights
from draftwire.models.openvino.runtime import import_openvino

KEY_CACHE, VALUE_CACHE = "key_cache", "value_cache"


class GraphBuilder:
    """Builds the graph of one model. Its constants share the memory of the model's weights where they can: copies would
    stay beside what the plugin packs.
    """

    def __init__(self, model: LeanModel, *, packed: KeptWeights | None, taps: Sequence[int] = ()) -> None:
        """Takes a model.

        Args:
            model: on the CPU. Its weights are constants in float32, whatever their types are.
            packed: its matrices in eight bits; None leaves them as they are. Embeddings, norms and biases are never.
            taps: layers before which hidden states are read; the number of layers stands for behind the last one.
        """
        self._ov = import_openvino()
        from openvino import opset15

        self._op: Any = opset15
        self._model, self._config = model, model.config
        self._packed, self._taps = packed, tuple(taps)
        self._names = {id(weight): name for name, weight in model.named_parameters()}
        self._head_size = head_size(model.config)
        self._parameters: list[Any] = []

    def build(self) -> Any:
        """Returns an `openvino.Model`."""
        op, base = self._op, self._model.model
        ids = self._parameter("input_ids", "i64", [-1])
        positions = self._parameter("position_ids", "i64", [-1])
        kept = self._parameter("kept", "i64", [-1])
        layout = [
            self._parameter(name, "i32", [-1])
            for name in ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
        ]
        longest = self._parameter("max_context_len", "i32", [])
        trees = [self._parameter("qq_bias", "u8", [-1]), self._parameter("qq_bias_begins", "i32", [-1])]
        table = op.constant(_array(base.embed_tokens.weight), shared_memory=True)
        rows = self._unsqueezed(op.gather(table, ids, self._int64(0)), 1)
        angles = self._angles(positions)
        states = {}
        for index, layer in enumerate(base.layers):
            states[index] = rows
            rows = op.add(rows, self._attended(index, layer, rows, angles, layout, longest, trees))
            rows = op.add(rows, self._mixed(layer, rows))
        states[len(base.layers)] = rows
        last = op.gather(op.squeeze(rows, self._int64([1])), kept, self._int64(0))
        own = table if self._model.lm_head.weight is base.embed_tokens.weight and self._packed is None else None
        matrix = own or self._matrix(self._model.lm_head.weight)
        results = [self._result("logits", op.matmul(self._normed(last, base.norm), matrix, False, True))]
        if self._taps:
            tapped = [op.squeeze(states[tap], self._int64([1])) for tap in self._taps]
            results.append(self._result("features", op.concat(tapped, -1)))
        return self._ov.Model(results, self._parameters, "llama")

    def _attended(
        self, index: int, layer: Any, rows: Any, angles: Any, layout: list[Any], longest: Any, trees: list[Any]
    ) -> Any:
        """Returns what a layer's attention adds to `[T, 1, hidden]` rows."""
        op, attention = self._op, layer.self_attn
        normed = self._normed(rows, layer.input_layernorm)
        num_heads, num_kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        queries = self._rotated(self._linear(normed, attention.q_proj), num_heads, query_norm, angles)
        keys = self._rotated(self._linear(normed, attention.k_proj), num_kv_heads, key_norm, angles)
        values = op.reshape(self._linear(normed, attention.v_proj), self._int64([0, -1]), True)
        caches = [self._parameter(f"{kind}.{index}", "dynamic", [-1] * 4) for kind in (KEY_CACHE, VALUE_CACHE)]
        read = self._paged_attention(attention, [queries, keys, values, *caches], layout, longest, trees)
        return self._linear(self._unsqueezed(read, 1), attention.o_proj)

    def _paged_attention(
        self, attention: Any, tensors: list[Any], layout: list[Any], longest: Any, trees: list[Any]
    ) -> Any:
        """Returns `[T, heads * head_dim]` rows, once keys and values of the new tokens are in the cache."""
        from openvino.op import _PagedAttentionExtension

        numbers, factors = self._constant(np.zeros(0, np.int32)), self._constant(np.zeros(0, np.float32))
        zero = self._constant(np.int32(0))
        # Mistral's layers read their window from the configuration.
        own = self._config.sliding_window if self._config.model_type == "mistral" else attention.sliding_window
        window = self._constant(np.int32(own or 0))
        inputs = [*tensors, *layout, self._constant(np.float32(attention.scaling)), window, factors, longest]
        inputs += [numbers] * 3  # how scores are reported: not at all
        inputs += [factors, factors, zero, zero]  # turned keys, of which there are none
        inputs += [self._constant(np.zeros((0, 0, 0, 0), np.float32)), zero, numbers, numbers, numbers, numbers, *trees]
        operation = _PagedAttentionExtension([each if _is_output(each) else each.output(0) for each in inputs])
        information, num_kv_heads = operation.get_rt_info(), self._config.num_key_value_heads
        information["num_k_heads"] = information["num_v_heads"] = num_kv_heads
        information["k_head_size"] = information["v_head_size"] = self._head_size
        return operation.output(0)

    def _mixed(self, layer: Any, rows: Any) -> Any:
        """Returns what a layer's MLP adds to rows."""
        op, mlp = self._op, layer.mlp
        normed = self._normed(rows, layer.post_attention_layernorm)
        gates, inner = self._linear(normed, mlp.gate_proj), self._linear(normed, mlp.up_proj)
        return self._linear(op.multiply(op.swish(gates), inner), mlp.down_proj)

    def _linear(self, rows: Any, module: nn.Linear) -> Any:
        product = self._op.matmul(rows, self._matrix(module.weight), False, True)
        return product if module.bias is None else self._op.add(product, self._constant(_array(module.bias)))

    def _matrix(self, weight: Tensor) -> Any:
        """Returns the node of an `[out, in]` matrix; one of eight bits in the pattern that the plugin keeps packed."""
        op = self._op
        if self._packed is None:
            return op.constant(_array(weight), shared_memory=True)
        packed = self._packed.matrix(self._names[id(weight)], weight)
        levels, zeros = (op.convert(op.constant(each), "f32") for each in (packed.levels, packed.zeros))
        return op.multiply(op.subtract(levels, zeros), op.constant(packed.scales))

    def _normed(self, rows: Any, norm: Any) -> Any:
        op = self._op
        mean = op.reduce_mean(op.power(rows, self._constant(np.float32(2.0))), self._int64([-1]), True)
        root = op.sqrt(op.add(mean, self._constant(np.float32(norm.variance_epsilon))))
        inverse = op.divide(self._constant(np.float32(1.0)), root)
        return op.multiply(op.multiply(rows, inverse), self._constant(_array(norm.weight)))

    def _angles(self, positions: Any) -> tuple[Any, Any]:
        """Returns cosines and sines of tokens' positions, `[T, 1, 1, head_dim]`."""
        op, rotation = self._op, self._model.model.rotary_emb
        steps = op.convert(self._unsqueezed(self._unsqueezed(positions, 1), 2), "f32")
        half = op.multiply(steps, self._constant(_array(rotation.inv_freq).reshape(1, 1, -1)))
        angles = op.concat([half, half], -1)
        turns = [self._unsqueezed(function(angles), 1) for function in (op.cos, op.sin)]
        if rotation.attention_scaling != 1.0:
            scale = self._constant(np.float32(rotation.attention_scaling))
            turns = [op.multiply(turn, scale) for turn in turns]
        return turns[0], turns[1]

    def _rotated(self, rows: Any, num_heads: int, norm: Any, angles: tuple[Any, Any]) -> Any:
        """Returns `[T, heads * head_dim]` of `[T, 1, heads * head_dim]`, each head normed if it has a norm."""
        op, middle = self._op, self._head_size // 2
        heads = op.reshape(rows, self._int64([0, 0, num_heads, self._head_size]), True)
        if norm is not None:
            heads = self._normed(heads, norm)
        heads = op.transpose(heads, self._int64([0, 2, 1, 3]))
        first, second = (
            op.slice(heads, self._int64([start]), self._int64([stop]), self._int64([1]), self._int64([3]))
            for start, stop in ((0, middle), (middle, np.iinfo(np.int64).max))
        )
        turned = op.concat([op.multiply(second, self._constant(np.float32(-1.0))), first], -1)
        cosines, sines = angles
        sums = op.add(op.multiply(heads, cosines), op.multiply(turned, sines))
        return op.reshape(op.transpose(sums, self._int64([0, 2, 1, 3])), self._int64([0, -1]), True)

    def _unsqueezed(self, node: Any, axis: int) -> Any:
        return self._op.unsqueeze(node, self._int64(axis))

    def _parameter(self, name: str, kind: str, shape: list[int]) -> Any:
        node = self._op.parameter(self._ov.PartialShape(shape), getattr(self._ov.Type, kind), name)
        node.get_output_tensor(0).set_names({name})
        self._parameters.append(node)
        return node

    def _result(self, name: str, node: Any) -> Any:
        result = self._op.result(node)
        result.get_output_tensor(0).set_names({name})
        return result

    def _constant(self, value: Any) -> Any:
        return self._op.constant(value)

    def _int64(self, value: int | list[int]) -> Any:
        return self._op.constant(np.array(value, np.int64))


def _is_output(node: Any) -> bool:
    return type(node).__name__ == "Output"


def _array(weight: Tensor) -> Any:
    """Returns the array of a weight in float32, whose memory it shares if it has that type."""
    return np.ascontiguousarray(weight.detach().float().numpy())
