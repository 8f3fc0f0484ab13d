"""What the modules of the library and the services import, read off their sources, so that nothing hides."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def files() -> dict[str, Path]:
    """Returns the file of each module, by name."""
    roots = [ROOT, *sorted((ROOT / "services").iterdir())]
    found = [(root, path) for root in roots for top in root.glob("draftwire*") for path in top.rglob("*.py")]
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for root, path in found
    }


@cache
def sources() -> dict[str, str]:
    """Returns what each module says, by name."""
    return {name: path.read_text() for name, path in files().items()}


@cache
def packages() -> frozenset[str]:
    """Returns the modules that are packages."""
    return frozenset(name for name, path in files().items() if path.name == "__init__.py")


def imported(source: str, package: str) -> Iterator[str]:
    """Yields every name that a module imports, also inside functions and for the type checker only."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def arrows(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns which of the modules each imports. One that is imported from a package is meant, not the package."""
    found: dict[str, set[str]] = {}
    for module, source in modules.items():
        names = {name for name in imported(source, module.rpartition(".")[0]) if name in modules}
        found[module] = {name for name in names if not any(other.startswith(f"{name}.") for other in names)} - {module}
    return found


def is_in(module: str, part: str) -> bool:
    """Whether a module is a part, or inside of it."""
    return module == part or module.startswith(f"{part}.")
