"""The page of the demo, the tokens of its users, and the commands that the page shows.

Every client that reaches the demo can act as any of its users, so it answers on this machine only.
The tokens are real ones, signed with a key that is made at each start and never leaves the process.
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

from headwater.demo.shop import PEOPLE, Person
from headwater.demo.terminal_commands import TerminalCommands
from headwater.errors import NotFound
from headwater.gateway.http.app import LocalOnly, refusal
from headwater.gateway.http.pages import folder
from headwater.settings import Settings

PAGE = Path(__file__).parent / "page"
TOKEN_SECONDS = 3600


def new_secret() -> str:
    """A random key to sign tokens with."""
    return secrets.token_urlsafe(48)


def token(person: Person, secret: str) -> str:
    """A token for this person."""
    claims = person.token_claims | {"exp": time.time() + TOKEN_SECONDS}
    return jwt.encode(claims, secret, algorithm="HS256")


def site(gateway: ASGIApp, settings: Settings, commands: TerminalCommands) -> ASGIApp:
    """The page and the gateway as one application."""
    secret = settings.auth.secret
    assert secret is not None, "the demo has a key for its tokens"

    async def send_token(request: Request) -> Response:
        person = PEOPLE.get(request.path_params["person"])
        if person is None:
            return refusal(
                NotFound("the demo has no such person", hint=f"Use one of: {', '.join(PEOPLE)}.")
            )
        return _json({"token": token(person, secret)})

    async def send_commands(request: Request) -> Response:
        return _json(commands)

    async def redirect_to_page(request: Request) -> Response:
        return RedirectResponse("/demo/")

    routes = [
        Route("/", redirect_to_page),
        Route("/demo/tokens/{person}", send_token, methods=["POST"]),
        Route("/demo/about", send_commands),
        folder("/demo", PAGE),
        Mount("/", gateway),
    ]
    return LocalOnly(Starlette(routes=routes))


def _json(document: Any) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(document), 200, headers, media_type="application/json")
