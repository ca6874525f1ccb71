"""Errors in the shape of OpenAI's API: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from sidestep.frontend.input.prompt_limit import PromptLimit
from sidestep.ipc.common.errors import (
    EngineDeadError,
    EngineStalledError,
    NoChatTemplateError,
    PromptTooLongError,
    QueueFullError,
    ValidationError,
    WorkerCallError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER = {"retry-after": "1"}
"""Header with the seconds to wait before the next try. A full queue stays full for some steps."""
TOO_LONG = "context_length_exceeded"
"""Code of the errors for prompts that are too long."""
NO_CHAT_TEMPLATE = "no_chat_template"
"""Code of the errors for conversations with a model that has no chat template."""


class ErrorDetail(msgspec.Struct):
    """Description of an error."""

    message: str
    type: str
    param: str | None = None
    """Field of the request that is wrong."""
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """Body of every answer that is an error."""

    error: ErrorDetail


class ApiError(Exception):
    """Error that becomes an answer. Its message is for the sender of the request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = ErrorBody(ErrorDetail(message, kind, param, code))

    def response(self) -> Response:
        """Return the answer with this error."""
        return Response(
            msgspec.json.encode(self.body), self.status, self.headers, media_type="application/json"
        )


class ClientGoneError(Exception):
    """Error of a request whose client has gone away."""


def refused(param: str, problem: str, code: str | None = None) -> ApiError:
    """Return the error for a field with a wrong value."""
    return ApiError(400, f"{param}: {problem}", param=param, code=code)


def too_long(
    field: str, limit: PromptLimit, num_tokens: int, *, at_least: bool = False
) -> ApiError:
    """Return the error for a prompt that does not fit, with output if there is any.

    Its message has the words that clients of OpenAI's API look for.
    """
    return ApiError(
        400,
        f"This model's maximum context length is {limit.max_model_len} tokens. However, your "
        f"{field} resulted in "
        f"{'at least ' * at_least}{num_tokens} tokens"
        f"{', and an answer needs at least one' * limit.needs_output}. "
        f"Please reduce the length of the {field}.",
        param=field,
        code=TOO_LONG,
    )


def as_api_error(error: Exception) -> ApiError:
    """Return an exception as the error that the client gets."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NoChatTemplateError):
        problem = f"{error.lack}; /v1/completions completes a prompt that is text"
        return refused(error.field, problem, NO_CHAT_TEMPLATE)
    if isinstance(error, ValidationError):
        code = TOO_LONG if isinstance(error, PromptTooLongError) else None
        return refused(error.field, str(error).partition(": ")[2], code)
    if isinstance(error, QueueFullError):
        return ApiError(
            429, str(error), kind="rate_limit_error", code="queue_full", headers=RETRY_AFTER
        )
    if isinstance(error, EngineDeadError | EngineStalledError):
        return ApiError(503, str(error), kind="server_error", code="engine_dead")
    if isinstance(error, WorkerCallError):
        return ApiError(409, str(error), kind="conflict_error", code="refused_by_workers")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, str(error) or type(error).__name__, kind="server_error")
