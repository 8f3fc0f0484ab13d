"""What guesses tokens from tokens alone, by name: for drafters, and for verifiers that draft by themselves."""

from draftwire.drafting.model_free.prompt_lookup import PromptLookup
from draftwire.drafting.model_free.suffix import SuffixDrafter
from draftwire.drafting.model_free.text_drafter import TextDrafter

TEXT_DRAFTERS: dict[str, TextDrafter] = {"suffix": SuffixDrafter(), "lookup": PromptLookup()}
