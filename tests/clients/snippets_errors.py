"""Calls that are refused, by the openai library, and what applications read of the errors.

Each function is one snippet; see snippets_openai.
"""

from __future__ import annotations

import openai

from tests.clients.snippets_openai import HELLO, MODEL, client


def an_unknown_model_is_not_found() -> None:
    try:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found" and error.param == "model"
    else:
        raise AssertionError("served")


def a_wrong_value_is_a_bad_request() -> None:
    try:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
    except openai.BadRequestError as error:
        assert error.param == "temperature" and error.type == "invalid_request_error"
    else:
        raise AssertionError("served")


def a_prompt_that_is_too_long() -> None:
    for field, ask in (
        (
            "messages",
            lambda: client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "word " * 3000}]
            ),
        ),
        ("prompt", lambda: client.completions.create(model=MODEL, prompt=[7] * 3000)),
        ("input", lambda: client.responses.create(model=MODEL, input="word " * 3000)),
    ):
        try:
            ask()
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded" and error.param == field
            assert "maximum context length is 2048 tokens" in error.message
        else:
            raise AssertionError("served")


def an_image_is_refused() -> None:
    try:
        client.chat.completions.create(
            model=MODEL,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                    ],
                }
            ],
        )
    except openai.BadRequestError as error:
        assert "read text alone" in error.message and error.param == "messages[0].content[1].type"
    else:
        raise AssertionError("served")


def embeddings_are_refused() -> None:
    try:
        client.embeddings.create(model=MODEL, input="a")
    except openai.BadRequestError as error:
        assert "--runner pooling" in error.message and error.code == "unsupported_task"
    else:
        raise AssertionError("served")


def files_and_batches_are_refused() -> None:
    for ask in (
        lambda: client.files.create(file=b"{}", purpose="batch"),
        lambda: client.batches.create(
            completion_window="24h", endpoint="/v1/chat/completions", input_file_id="f"
        ),
    ):
        try:
            ask()
        except openai.NotFoundError as error:
            assert "sidestep run-batch" in error.message
        else:
            raise AssertionError("served")


def older_names_are_refused_with_the_newer() -> None:
    for given, newer in (
        ({"guided_json": {"type": "object"}}, "structured_outputs"),
        ({"functions": [{"name": "f"}]}, "tools"),
    ):
        try:
            client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=given)
        except openai.BadRequestError as error:
            assert newer in error.message and error.code == "unsupported_field"
        else:
            raise AssertionError("served")
