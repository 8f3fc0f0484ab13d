"""Tensor parallelism for models that transformers runs.

transformers has a tensor-parallel plan for many architectures: which projections are divided, and how. If the plan is
one that is supported here, a rank's shard is a smaller model of the same architecture, whose layers all-reduce their
outputs.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from draftwire.models.decoders import TransformersDecoder
from draftwire.models.parallel.process_group import ProcessGroup

BY_QUERY_HEAD, BY_KEY_HEAD = ("q_proj",), ("k_proj", "v_proj")
BY_INNER = ("gate_proj", "up_proj")
SUMMED = ("o_proj", "down_proj")
"""Projections whose outputs are all-reduced."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_STYLES = {
    **dict.fromkeys((*BY_QUERY_HEAD, *BY_KEY_HEAD, *BY_INNER), "colwise"),
    **dict.fromkeys(SUMMED, "rowwise"),
    **dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce"),  # of single heads
}


def why_not_spread(model: PreTrainedModel) -> str:
    """Returns the reason why `SpreadTransformersDecoder` does not support a model; empty if it does."""
    config = model.config
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        return f"transformers has no plan for models of type {config.model_type}"
    unknown = {f"{style} for {name}" for name, style in plan.items() if _STYLES.get(name.rpartition(".")[2]) != style}
    if unknown:
        return f"the plan of transformers has {', '.join(sorted(unknown))}, which is not known here"
    missing = {*_STYLES} - {"q_norm", "k_norm"} - {name.rpartition(".")[2] for name in plan}
    if missing or not {EMBEDDING, HEAD} <= model.state_dict().keys():
        return f"models of type {config.model_type} have layers of other names"
    return ""


class SpreadTransformersDecoder(TransformersDecoder):
    """Decoder for a rank's shard of a model. Only rank 0 gets logits of the whole vocabulary."""

    def __init__(self, model: PreTrainedModel, group: ProcessGroup, vocab_size: int) -> None:
        """Wraps a shard.

        Args:
            model: has some of the heads, of the MLPs' inner dimension and of the output's rows, the last of which may
                be padding.
            group: its ranks have the other shards.
            vocab_size: rows of the whole output.
        """
        super().__init__(model)
        self.vocab_size = vocab_size

        def add_up(_: nn.Module, _inputs: Any, part: Tensor) -> Tensor:
            group.all_reduce(part)
            return part

        def bring_together(_: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
            return group.gather_columns(logits[0])[:, :vocab_size].contiguous().unsqueeze(0)

        for name, module in model.named_modules():
            if name.rpartition(".")[2] in SUMMED:
                module.register_forward_hook(add_up)
        head: Any = model.get_output_embeddings()
        head.register_forward_hook(bring_together)
