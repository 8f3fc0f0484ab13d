"""The prompts that benchmarks and end-to-end tests use: beginnings of held-out files.

    python -m benchmarks.prompts

writes `benchmarks/prompts.json` from the standard library of the running interpreter, for the tokenizer in
`models/target`. The file is committed, so that every machine uses the same prompts.
"""

import json
import random
from pathlib import Path

from transformers import AutoTokenizer

from tools.embedded_pair.corpus import standard_library

FILE = Path(__file__).parent / "prompts.json"
COUNT = 200
PROMPT_TOKENS = 64
SEED = 20


def load_prompts() -> list[str]:
    """Returns the committed prompts: pieces of held-out files, each about `PROMPT_TOKENS` tokens long."""
    prompts: list[str] = json.loads(FILE.read_text())
    return prompts


def main() -> None:
    """Cuts the prompts at random places, each at the start of a line."""
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "models" / "target")
    files = [file for file in standard_library() if file.held_out]
    generator = random.Random(SEED)
    weights = [len(file.text) for file in files]
    prompts: list[str] = []
    while len(prompts) < COUNT:
        text = generator.choices(files, weights)[0].text
        start = text.rfind("\n", 0, generator.randrange(len(text))) + 1
        ids: list[int] = tokenizer(text[start : start + 8 * PROMPT_TOKENS])["input_ids"]
        if len(ids) >= PROMPT_TOKENS:
            prompts.append(str(tokenizer.decode(ids[:PROMPT_TOKENS])))
    FILE.write_text(json.dumps(prompts, indent=0) + "\n")


if __name__ == "__main__":
    main()
