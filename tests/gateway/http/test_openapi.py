"""The OpenAPI document is true: for requests generated from it, no answer is a 500, and each is one
that the document lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok

from headwater.admin import routes as admin
from headwater.embedded import EmbeddedPostgres
from headwater.gateway.http import openapi
from headwater.gateway.http.app import create_app
from headwater.past import routes as past
from headwater.testing.gateway_process import Served
from tests.support.applications.shop import shop_served

SCHEMA = schemathesis.openapi.from_dict(openapi.document())
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations() if isinstance(found, Ok)]
FOR_OPERATORS = ("/metrics", "/healthz", "/readyz")


@pytest.fixture(scope="module")
def gateway(postgres: EmbeddedPostgres) -> Iterator[Served]:
    limits = {"limits_requests_per_second": 100_000, "limits_sessions_per_ip": 1000}
    with shop_served(postgres.url, rows=5, **limits) as served:
        yield served


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.label)
def test_no_answer_is_a_500_or_undocumented(gateway: Served, operation: Any) -> None:
    foreseen = set(map(int, operation.definition.raw["responses"]))

    @given(data=st.data())
    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    def generated(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy())
        sent = case.as_transport_kwargs(base_url=gateway.url)
        with requests.Session() as session:
            session.trust_env = False
            try:
                answer = session.request(**sent, stream=True, timeout=20)
            except (ValueError, requests.exceptions.InvalidHeader):
                return  # what the client itself cannot send
            with answer:
                assert answer.status_code in foreseen | {404, 405, 431}, answer.text[:500]
                if answer.status_code >= 400 and answer.status_code not in (404, 405, 431):
                    assert answer.json()["error"]["code"]

    generated()
    assert gateway.get("/healthz").status_code == 200
    assert "Traceback" not in gateway.log.read_text()


def test_every_path_is_described() -> None:
    unused = lambda: pytest.fail("no gateway is needed")  # noqa: E731
    app = create_app(unused, more=[*admin.routes(unused), *past.routes(unused)])
    served = {
        route.path.replace(":path", "")  # type: ignore[attr-defined]
        for route in app.routes
        if hasattr(route, "methods")
    }
    assert served - {"/openapi.json"} == set(openapi.document()["paths"])


def test_it_serves_the_document(gateway: Served) -> None:
    assert gateway.get("/openapi.json").json()["openapi"].startswith("3.")
    assert httpx.get(f"{gateway.url}/nothing", trust_env=False).status_code == 404
