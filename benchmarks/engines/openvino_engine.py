"""OpenVINO GenAI: its pipeline with continuous batching, computed in float32, with weights in float32 or in eight bits,
as `--weights` says. Needs openvino-genai and optimum-intel.

A model is converted when it is first used, into a folder beside its weights.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from protocol import Task, answer_tasks, parse_options

EXPORT = """
import sys
import openvino
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer
model = OVModelForCausalLM.from_pretrained(sys.argv[1], export=True, load_in_8bit=sys.argv[3] == "u8", compile=False)
model.save_pretrained(sys.argv[2])
parts = convert_tokenizer(AutoTokenizer.from_pretrained(sys.argv[1]), with_detokenizer=True)
for part, name in zip(parts, ("tokenizer", "detokenizer")):
    openvino.save_model(part, f"{sys.argv[2]}/openvino_{name}.xml")
"""
"""Runs in a process of its own, whose memory is free afterwards."""
NGRAM = "ngram"
"""In the place of a draft model: drafts from earlier places of the text."""
LARGEST_MATCH = 3
"""Tokens by which such a place is found, as in OpenVINO's own sample."""
BLOCK_SIZE = 32
"""Tokens of a block of the KV cache on a CPU."""


def load() -> Callable[[Task], list[list[int]]]:
    """Returns the pipeline as a function."""
    options = parse_options(__doc__)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = options.cache_tokens // BLOCK_SIZE
    scheduler.max_num_seqs = options.max_sessions
    scheduler.enable_prefix_caching = False
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "INFERENCE_NUM_THREADS": options.threads,
    }
    draft: dict[str, object] = {}
    if options.drafter == NGRAM:
        draft = {"prompt_lookup": True}
    elif options.drafter is not None:
        draft = {
            "draft_model": openvino_genai.draft_model(converted(options.drafter, options.weights), "CPU", **settings)
        }
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        converted(options.target, options.weights), scheduler, "CPU", {**settings, **draft}
    )

    def generate(task: Task) -> list[list[int]]:
        how = openvino_genai.GenerationConfig()
        how.max_new_tokens = task["num_tokens"]
        how.ignore_eos = True
        how.set_eos_token_id(0)  # it wants one
        how.do_sample = task["temperature"] > 0.0
        if how.do_sample:
            how.temperature, how.top_p, how.top_k, how.rng_seed = task["temperature"], 1.0, 2**31 - 1, task["seed"]
        if options.drafter is not None:
            how.num_assistant_tokens = options.num_draft_tokens
        if options.drafter == NGRAM:
            how.max_ngram_size = LARGEST_MATCH
        prompts = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in task["prompts"]]
        results = pipeline.generate(prompts, [how] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    return generate


def converted(folder: str, weights: str) -> str:
    """Returns the folder of a model in OpenVINO's format."""
    result = Path(folder) / f"openvino_{weights}"
    if not result.exists():
        subprocess.run([sys.executable, "-c", EXPORT, folder, str(result), weights], check=True)
    return str(result)


if __name__ == "__main__":
    answer_tasks(load)
