"""The path of one round: which modules it imports, and how long they are.

    python -m tests.path            # the modules, with their lines and who imports each, and the sums

The roots are the gateway's loop, the schedulers and engines of drafter and verifier, and what these run and know by its
interface alone: our own decoder, and the drafter with a language model. What they import counts, transitively, also
inside functions and for the type checker only. `draftwire.runtime` and `draftwire.v1` do not count: they are what every
process is made of. Of a package that is imported, what its `__init__` imports is followed, and its own lines are not
counted.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    "draftwire.models.torch_engine",
    "draftwire.drafting.language_model",
)
OPTIONS = {
    "token trees": ("draftwire.options.trees*", "draftwire_gateway.options.tree_*", "draftwire.method.tree_limits"),
    "heads": ("draftwire.options.heads*", "draftwire_verifier.feature_feeds"),
    "drafting ahead": (
        "draftwire.options.ahead*",
        "draftwire.method.ahead_limits",
        "draftwire_gateway.options.drafts_ahead",
    ),
    "blocks that end unsure": (
        "draftwire.options.confidence*",
        "draftwire.method.confidence",
        "draftwire_gateway.options.confident_drafts",
    ),
    "guesses without a model": ("draftwire.options.model_free*", "draftwire_gateway.options.local_drafting"),
    "forms": (
        "draftwire.options.structured_output*",
        "draftwire.requests.structured_output",
        "draftwire.requests.tool_calls",
        "draftwire_verifier.slow_masks",
        "draftwire_gateway.options.mask_allowance",
    ),
    "log-probabilities": ("draftwire.options.logprobs*",),
    "the adaptive chooser": ("draftwire_gateway.speculation*",),
    "OpenVINO": ("draftwire.models.openvino*",),
    "recorded steps": ("draftwire.models.static_steps", "draftwire.models.torch_models"),
    "layer-parallel drafting": ("draftwire.options.layer_parallel*",),
    "tensor-parallel targets": ("draftwire.models.parallel*",),
}
"""Options that a round of a fixed chain does without, and the modules that belong to each, as patterns of `fnmatch`."""
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


def imports_of(roots: Sequence[str], added: Mapping[str, str] | None = None) -> Imports:
    """Returns what some modules import, themselves included.

    Args:
        roots: the modules.
        added: lines that some modules are taken to have beside their own, by name.
    """
    importer_of: dict[str, str] = {}
    waiting = [(root, root) for root in roots]
    while waiting:
        module, importer = waiting.pop(0)
        if module in importer_of or any(is_in(module, part) for part in NOT_COUNTED):
            continue
        importer_of[module] = importer
        names = _names_in(module, sources()[module] + "\n" + (added or {}).get(module, ""))
        waiting.extend((name, module) for name in sorted(names))
    return Imports(importer_of)


@cache
def _names_in(module: str, source: str) -> Collection[str]:
    package = module if module in packages() else module.rpartition(".")[0]
    return {name for name in imported(source, package) if name in sources()} - {"draftwire"}


def options_in(found: Imports) -> list[str]:
    """Returns which options some modules know, and who imports what of them, a line each."""
    named = ((option_of(module), module, importer) for module, importer in found.importer_of.items())
    return [f"{option}: {module} <- {importer}" for option, module, importer in named if option is not None]


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
