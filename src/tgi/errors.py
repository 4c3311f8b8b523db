"""The few errors that cross a room or a process boundary.

TgiError
├── StartupError           a program cannot start: one line for the operator, exit code 1
├── InvalidRequest         the client's fault: `param` names the field
│   ├── TemplateFailed     the chat template is missing or raised
│   ├── ToolFailed         the tool that is to be called does not exist
│   └── ContextTooLong     prompt, or prompt and max_tokens, exceed the limit
├── Overloaded             no permit or the queue is full: try again later
├── GenerationFailed       the model failed on this request
└── Unavailable            the shard is not there (yet, or any more)

A status is chosen in one place per door: `router/api/errors.py`, `server/rpc/interceptors.py`, each `cli.py`.
"""

from __future__ import annotations


class TgiError(Exception):
    """Root of everything we raise on purpose. `str(error)` is one line, fit for its reader."""


class StartupError(TgiError):
    """A program cannot start. The message says what is wrong and what to do."""


class InvalidRequest(TgiError):
    """The request is wrong. `param` names the field where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TemplateFailed(InvalidRequest):
    """The chat template is missing, does not compile, or raised."""


class ToolFailed(InvalidRequest):
    """The tool that is to be called does not exist."""


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt and what is asked for, does not fit the context."""


class Overloaded(TgiError):
    """More requests than the server takes at once. `retry_after_s` is a hint."""

    def __init__(self, message: str = "Model is overloaded", retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GenerationFailed(TgiError):
    """The model server failed on this request alone."""


class Unavailable(TgiError):
    """The model server cannot be reached."""
