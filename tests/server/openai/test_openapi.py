"""The OpenAPI document: it has every route, and describes all answers of the server."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi import checks as openapi_checks

from sidestep.frontend.server.openapi import OPERATIONS, make_document
from tests.server.live import LiveServer

schema: Any = schemathesis.openapi.from_dict(make_document("0"))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_every_operation_is_a_route_and_every_route_an_operation(
    operation: Any, fake: LiveServer
) -> None:
    document = fake.http.get("/openapi.json").json()
    assert set(document["paths"]) == {each.path for each in OPERATIONS}
    (method,) = document["paths"][operation.path]
    other = "POST" if method == "get" else "GET"
    path = operation.path.replace("{model}", "fake")
    assert fake.http.request(other, path).status_code == 405
    assert fake.http.request(method.upper(), path).status_code != 404


def test_fields_that_do_nothing_yet_show_what_they_take() -> None:
    fields = make_document("0")["components"]["schemas"]["ChatRequest"]
    assert fields["properties"]["service_tier"]["enum"] == [None, "auto", "default"]
    assert "structured_outputs" in fields["properties"]["guided_json"]["description"]
    assert fields["additionalProperties"] is False


@schema.parametrize()  # type: ignore[untyped-decorator]  # schemathesis does not type it
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_answer_is_a_5xx_or_outside_of_the_document(case: Any, fake: LiveServer) -> None:
    if isinstance(case.body, dict):
        # This test is about neither another model's name nor the answer's length.
        case.body.pop("model", None)
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 20)
    answer = case.call(base_url=fake.url)
    case.validate_response(
        answer,
        checks=[
            schemathesis.checks.not_a_server_error,
            openapi_checks.status_code_conformance,
            openapi_checks.content_type_conformance,
            openapi_checks.response_schema_conformance,
        ],
    )
