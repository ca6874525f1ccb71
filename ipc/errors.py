"""The exceptions a user of the engine can meet. They cross process borders as text, never as objects."""

from __future__ import annotations


class SidestepError(Exception):
    """Base of every error that the engine raises on purpose."""


class ValidationError(SidestepError, ValueError):
    """An argument is wrong. `field` names it; the message starts with that name and says what would be right."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class EngineStartError(SidestepError, RuntimeError):
    """The engine could not start; the message is one line that says what to change."""


class EngineDeadError(SidestepError, RuntimeError):
    """A process of the engine has died. Every waiting call raises it, and so does every later one."""


class EngineStalledError(SidestepError, RuntimeError):
    """The engine is alive but has made no progress for longer than the health check allows."""


class QueueFullError(SidestepError, RuntimeError):
    """As many requests or prompt tokens wait as may: nothing was sent, and the same call may do better later."""


class RequestError(SidestepError, RuntimeError):
    """One request failed inside the engine; the others go on."""


class RemoteError(SidestepError, RuntimeError):
    """A server elsewhere has refused a request, or failed, or cannot be reached."""
