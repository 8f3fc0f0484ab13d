"""What was inferred about a round on a GPU before it was measured: docs/gpu.md, "Inferred, and measured".

For a target of Llama 3 8B's shape in bfloat16 on one NVIDIA H200, if nothing else is said. It follows from the times of
whole steps on two cards of different bandwidth, and from operations that were counted on a CPU.
"""

READ_TB_PER_S = 4.35
"""Bandwidth of reading memory."""
COPY_TB_PER_S = 4.3
"""Bandwidth of copies, bytes read and bytes written added up."""
WEIGHTS_MS = 3.45
"""Reading the target's weights once: what a step takes at best."""

OPERATION_US = 25.0
"""Host time of an operation that is launched by itself: 23 to 28 in the rule, in the audit and in drawing."""
NODE_US = 5.3
"""What a small node of a recorded step takes, its start included: `REST_MS` over about 530 of them."""
DOWNLOAD_US = 40.0
"""A download to pinned memory, with its wait."""

STEP_MS = 7.0
"""A recorded step over five tokens of one text."""
PRODUCTS_SHARE = 0.81
"""Bandwidth of the matrix products of such a step, as a share of `READ_TB_PER_S`."""
REST_MS = 2.8
"""All of such a step but its matrix products: attention and small kernels, and their starts."""
LONG_TEXT_MS = 2.5
"""What a text of 8,192 tokens adds to such a step: 2 to 3."""
GATHERS_MS = 4.2
"""Copying keys and values in a step over 64 texts of 512 tokens, on an H100."""

RULE_OPERATIONS = 125
"""Launched for a chain of four at temperature 1, from logits to decision, without the audit."""
AUDIT_OPERATIONS = 36
"""Launched for the audit of such a chain."""
TREE_OPERATIONS = {14: 470, 60: 820}
"""Launched to decide about a tree of so many nodes, without its audit."""
TREE_AUDIT_OPERATIONS = 75
"""Launched for the audit of a tree of 60."""
TREE_MS = 21.0
"""The host's time for those of a tree of 60."""
DRAW_OPERATIONS = 31
"""Launched to draw one token of a draft."""
