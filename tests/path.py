"""The path of one round: which modules it imports, and how long they are.

    python -m tests.path            # the modules, with their lines and who imports each, and the sums

The roots are the gateway's loop, the schedulers and engines of drafter and verifier, and what these run and know by its
interface alone: our own decoder, and the drafter with a language model. What they import counts, transitively, also
inside functions and for the type checker only. `draftwire.runtime` and `draftwire.v1` do not count: they are what every
process is made of. Of a package that is imported, what its `__init__` imports is followed, and its own lines are not
counted.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from tests.imports import ROOT, files, imported, is_in, packages, sources

ROOTS = (
    "draftwire_gateway.session.loop",
    "draftwire_drafter.scheduler",
    "draftwire_drafter.engine",
    "draftwire_verifier.scheduler",
    "draftwire_verifier.engine",
    "draftwire.models.cached_model",
    "draftwire.models.lean_decoder",
    "draftwire.drafting.language_model",
)
OPTIONS = {
    "token trees": (
        "draftwire.options.trees*",
        "*tree*",
        "*.growth_plan",
        "*.walk",
        "*.traversal",
        "*.sibling_residuals",
    ),
    "heads": (
        "draftwire.options.heads*",
        "*.heads*",
        "*.head_*",
        "*.taps",
        "*.tapped_pass",
        "*.feature_*",
        "*.feeding",
    ),
    "drafting ahead": (
        "draftwire.options.ahead*",
        "*.ahead*",
        "*.lookahead",
        "*.branching",
        "*held_*",
        "*.drafts_ahead",
    ),
    "guesses without a model": ("draftwire.options.model_free*", "*.model_free*", "*.local_drafts"),
    "forms": ("draftwire.options.structured_output*", "*.structured_output", "*.tool_calls", "*slow_masks*", "*form_*"),
    "the adaptive chooser": ("draftwire_gateway.speculation*",),
    "layer-parallel drafting": ("draftwire.options.layer_parallel*", "*.parallel*"),
}
"""What a round of a fixed chain does without, and the modules that belong to it, as patterns of `fnmatch`."""
NOT_COUNTED = ("draftwire.runtime", "draftwire.v1")
ROUND = ROOT / "docs" / "round.md"


@dataclass(frozen=True, slots=True)
class Imports:
    """What some modules import, transitively."""

    importer_of: dict[str, str]
    """Who imports each module first, in the order in which they are found; a root imports itself."""

    @property
    def modules(self) -> list[str]:
        """The modules that count, by name."""
        return sorted(set(self.importer_of) - packages())

    @property
    def num_lines(self) -> int:
        """Lines of the modules that count."""
        return lines_of(self.modules)


def option_of(module: str) -> str | None:
    """Returns the option that a module belongs to; None if it belongs to none."""
    return next((name for name, parts in OPTIONS.items() if any(fnmatchcase(module, part) for part in parts)), None)


def lines_of(modules: Iterable[str]) -> int:
    """Returns how many lines some modules have."""
    return sum(len(sources()[module].splitlines()) for module in modules)


@cache
def _names_in(module: str) -> Collection[str]:
    package = module if module in packages() else module.rpartition(".")[0]
    return {name for name in imported(sources()[module], package) if name in sources()} - {"draftwire"}


def imports_of(roots: Sequence[str]) -> Imports:
    """Returns what some modules import, themselves included."""
    importer_of: dict[str, str] = {}
    waiting = [(root, root) for root in roots]
    while waiting:
        module, importer = waiting.pop(0)
        if module in importer_of or any(is_in(module, part) for part in NOT_COUNTED):
            continue
        importer_of[module] = importer
        waiting.extend((name, module) for name in sorted(_names_in(module)))
    return Imports(importer_of)


@cache
def files_of_a_round() -> list[str]:
    """Returns the modules that docs/round.md lists as those that one round passes, in their order."""
    listed = re.findall(r"^\| \[`([\w./]+\.py)`\]", ROUND.read_text(), re.MULTILINE)
    by_file = {path.relative_to(ROOT).as_posix(): name for name, path in files().items()}
    return [by_file[file] for file in dict.fromkeys(listed)]


def main() -> None:
    """Prints the modules and the sums."""
    found = imports_of(ROOTS)
    for module in found.modules:
        print(f"{lines_of([module]):6,}  {module}  <- {found.importer_of[module]}")
    print(f"{found.num_lines:6,}  lines in {len(found.modules)} modules")
    print(f"{lines_of(files_of_a_round()):6,}  of the {len(files_of_a_round())} files that docs/round.md lists")


if __name__ == "__main__":
    main()
