"""What this edge refuses itself."""


class RefusedError(Exception):
    """A request that this edge refuses itself. The message holds nothing of the request but names and numbers."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
