"""The exceptions that users of the engine can meet.

They cross process borders as text, never as objects.
"""

from __future__ import annotations

import copy
from typing import Any, Self


class SidestepError(Exception):
    """Base of every error that the engine raises on purpose.

    All can be pickled and copied, whatever arguments they are made of.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, self.__dict__)


def _restore(
    kind: type[SidestepError], args: tuple[Any, ...], fields: dict[str, Any]
) -> SidestepError:
    """Make a copy of an error from its fields, without calling its constructor."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class ValidationError(SidestepError, ValueError):
    """An argument is wrong.

    `field` names it; the message starts with that name and says what would be right.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field

    def in_list(self, name: str, index: int) -> Self:
        """Return the same error for one of several values, such as 'prompts[3]'."""
        twin = copy.copy(self)
        twin.field = f"{name}[{index}]"
        twin.args = (f"{twin.field}: {str(self).partition(': ')[2]}",)
        return twin


class UnknownNameError(ValidationError, TypeError):
    """The name of an argument is unknown to the function or class."""


class UnsupportedError(SidestepError, AttributeError, NotImplementedError):
    """A feature of another engine does not exist here. The message names its replacement."""


class PromptTooLongError(ValidationError):
    """A prompt does not fit. It has `num_tokens`, or at least as many."""

    def __init__(
        self,
        field: str,
        num_tokens: int,
        max_model_len: int,
        *,
        at_least: bool = False,
        with_output: bool = True,
    ) -> None:
        """Write the message. with_output: whether a token of output must fit too."""
        super().__init__(
            field,
            f"has {'at least ' if at_least else ''}{num_tokens} tokens; "
            f"{'with one of output ' if with_output else ''}that is more than max_model_len "
            f"({max_model_len})",
        )
        self.num_tokens = num_tokens
        self.at_least = at_least


class NoChatTemplateError(ValidationError):
    """A model has no chat template for a conversation. `lack` says so without advice."""

    def __init__(self, lack: str) -> None:
        super().__init__(
            "messages", f"{lack}; give the prompt as text, or a template (chat_template)"
        )
        self.lack = lack


class EngineStartError(SidestepError, RuntimeError):
    """The engine could not start; the message is one line that says what to change."""


class EngineDeadError(SidestepError, RuntimeError):
    """A process of the engine has died. Every waiting call and every later one raises this."""


class EngineStalledError(SidestepError, RuntimeError):
    """The engine is alive but has made no progress for longer than the health check allows."""


class QueueFullError(SidestepError, RuntimeError):
    """The queue holds as many requests or prompt tokens as it may.

    Nothing was sent, and the same call may succeed later.
    """


class RequestError(SidestepError, RuntimeError):
    """One request failed inside the engine; the others go on."""


class WorkerCallError(SidestepError, RuntimeError):
    """The workers have refused a call such as `sleep`, or have not answered it in time.

    The engine goes on.
    """


class RemoteError(SidestepError, RuntimeError):
    """A server elsewhere has refused a request, or failed, or cannot be reached."""


class CannotChatError(RemoteError):
    """The model of a server elsewhere has no chat template."""
