"""Errors that the HTTP edge raises itself."""


class RefusedError(Exception):
    """A request that the HTTP edge refuses. The message quotes only names and numbers of the request."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
