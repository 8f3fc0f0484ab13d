"""Names of routes in metrics and logs: their patterns, since paths are chosen by clients and may hold user data."""

from collections.abc import Collection

ROUTES = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ping",
        "/ready",
        "/version",
        "/metrics",
        "/openapi.json",
    }
)
"""Routes without a parameter in their path."""
MODELS = "/v1/models/"
MODEL = "/v1/models/{name}"
INDEX, FILE = "/", "/{file}"
"""The playground's page, and the other files of it."""
OTHER = "other"
"""Name of all paths that lead nowhere."""


def route_of(path: str, files: Collection[str] = ()) -> str:
    """Returns the name of the route that a path leads to; `files` are the paths of static files."""
    if path in ROUTES:
        return path
    if path.startswith(MODELS):
        return MODEL
    if path in files:
        return INDEX if path == INDEX else FILE
    return OTHER
