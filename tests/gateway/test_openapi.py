"""The OpenAPI document and the page of fields say what is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.offered import offered

from midflight.gateway.dialects.chat import ChatBody
from midflight.gateway.dialects.completions import CompletionBody
from midflight.gateway.dialects.fields import Body
from midflight.gateway.dialects.native import NativeBody, NativeSampling
from midflight.gateway.dialects.unread_fields import HARMLESS, IGNORED, NEUTRAL, REFUSED, TOOLS
from midflight.gateway.http.http import DIALECTS
from midflight.gateway.http.openapi import DESCRIBED, openapi_document
from midflight.testing.virtual_time import run_virtual

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "fields.md").read_text()


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from ([value["$ref"]] if isinstance(value.get("$ref"), str) else ())
        for inner in value.values():
            yield from refs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from refs(inner)


def test_every_dialect_is_described_with_the_body_it_parses() -> None:
    assert {dialect.path for dialect in DIALECTS} <= set(DESCRIBED)
    document: Any = openapi_document("policy")
    for path, described in DESCRIBED.items():
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{described.body.__name__}"}
        known = document["components"]["schemas"][described.body.__name__]["properties"]
        assert set(known) == {field.alias or name for name, field in described.body.model_fields.items()}


def test_every_reference_leads_to_a_schema() -> None:
    document: Any = openapi_document("policy")
    found = set(refs(document))
    assert "#/components/schemas/Fault" in found
    assert {ref.removeprefix("#/components/schemas/") for ref in found} <= set(document["components"]["schemas"])


def test_every_described_route_is_served_and_answers_faults_in_the_shape_described() -> None:
    async def main() -> None:
        async with offered() as it:
            document = (await it.http.get("/openapi.json")).json()
            assert document == openapi_document("policy")
            for path, item in document["paths"].items():
                if "post" in item:
                    answer = await it.http.post(path.replace("{model}", "policy"), content=b"{}")
                    assert answer.status_code == 400
                    name = item["post"]["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                    assert set(document["components"]["schemas"][name]["required"]) <= set(answer.json())
                else:
                    answer = await it.http.get(path.replace("{model}", "policy"))
                    schema = item["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                    assert set(document["components"]["schemas"][schema]["required"]) <= set(answer.json())

    run_virtual(main())


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, NativeBody, NativeSampling])
def test_the_page_of_the_gateway_names_every_field(body: type[Body]) -> None:
    missing = [name for name in body.model_fields if f"`{name}`" not in PAGE]
    assert not missing


def test_the_page_of_the_gateway_names_what_is_ignored_and_what_is_refused() -> None:
    missing = [name for name in (*HARMLESS, *IGNORED, *NEUTRAL, *REFUSED, *TOOLS) if f"`{name}`" not in PAGE]
    assert not missing
