"""What the toolbox tells a person when it cannot go on."""

from __future__ import annotations


class ToolError(Exception):
    """A sentence for a person. It is printed as it is, without a traceback, and the command ends with `exit_code`."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
