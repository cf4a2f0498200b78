"""The demo's page, the tokens of its people, and what it tells about itself.

Whoever reaches the demo may be any of its people, so it answers on this machine only. The tokens
are real ones, signed with a key that is made at each start and never leaves the process.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import jwt
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from headwater.demo.by_hand import About
from headwater.demo.shop import PEOPLE, Person
from headwater.errors import NotFound
from headwater.gateway.http.app import LocalOnly, refusal
from headwater.gateway.http.pages import folder
from headwater.settings import Settings

PAGE = Path(__file__).parent / "page"
TOKEN_SECONDS = 3600


def new_secret() -> str:
    """A key to sign tokens with."""
    return secrets.token_urlsafe(48)


def token(person: Person, secret: str) -> str:
    """A token that says who this is."""
    claims = person.token_claims | {"exp": time.time() + TOKEN_SECONDS}
    return jwt.encode(claims, secret, algorithm="HS256")


def site(gateway: ASGIApp, settings: Settings, about: About) -> ASGIApp:
    """The page, beside a gateway with these settings."""
    secret = settings.auth.secret
    assert secret is not None, "the demo's people have tokens"

    async def hand_out_token(request: Request) -> Response:
        person = PEOPLE.get(request.path_params["person"])
        if person is None:
            return refusal(NotFound("the demo has no person of that name"))
        return _json({"token": token(person, secret)})

    async def tell_about(request: Request) -> Response:
        return _json(about)

    async def go_to_page(request: Request) -> Response:
        return RedirectResponse("/demo/")

    routes = [
        Route("/", go_to_page),
        Route("/demo/tokens/{person}", hand_out_token, methods=["POST"]),
        Route("/demo/about", tell_about),
        folder("/demo", PAGE),
        Mount("/", gateway),
    ]
    return LocalOnly(Starlette(routes=routes))


def _json(document: Any) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(document), 200, headers, media_type="application/json")
