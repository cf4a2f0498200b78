"""Live queries in a Starlette application, each user seeing their own rows.

    uvicorn starlette_app:app --timeout-graceful-shutdown 5
    token=$(python -c 'import starlette_app; print(starlette_app.token_for("ann"))')
    curl -N localhost:8000/live/v1/live -H "Authorization: Bearer $token" -d '{"table": "notes"}'
    curl localhost:8000/notes/ann -d 'Buy milk'

The token says who the user is; the rule below says which rows the user may see. It uses the
embedded PostgreSQL, or the database in HEADWATER_URL.
"""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import jwt
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from headwater import AccessRequest, Filter, Headwater, Identity, c

SECRET = os.environ.get("NOTES_SECRET", "thirty-two bytes or more, and only for the example")

hw = Headwater(auth_secret=SECRET)


@hw.authorize
def own_notes(identity: Identity, request: AccessRequest) -> bool | Filter:
    if request.table == "notes":
        return c.owner == identity.user
    return False


def token_for(user: str) -> str:
    """In an application of yours, the login does this, after it has verified the user."""
    return jwt.encode({"sub": user, "exp": int(time.time()) + 3600}, SECRET, algorithm="HS256")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with hw:
        async with hw.connection() as connection:
            await connection.execute(
                "create table if not exists notes (id int generated always as identity"
                " primary key, owner text not null, body text not null)"
            )
        await hw.enable("notes")
        yield


async def add_note(request: Request) -> PlainTextResponse:
    values = request.path_params["owner"], (await request.body()).decode()
    async with hw.connection() as connection:
        await connection.execute("insert into notes (owner, body) values (%s, %s)", values)
    return PlainTextResponse("Noted.\n", status_code=201)


app = Starlette(
    routes=[Route("/notes/{owner}", add_note, methods=["POST"]), Mount("/live", hw.asgi())],
    lifespan=lifespan,
)
