"""A task list in a FastAPI application: tokens, a query, a mutation and a live query.

    uvicorn fastapi_app:app --timeout-graceful-shutdown 5
    auth="Authorization: Bearer $(curl -s -u ann:tea -X POST localhost:8000/token)"
    curl -N localhost:8000/live/v1/query/open_tasks/subscribe -H "$auth" -d '{}'
    curl localhost:8000/live/v1/mutation/add_task -H "$auth" -d '{"title": "Sweep"}'

/token is the application's own, everything below /live is Headwater's, which asks for a token. The
same tasks as a live query: curl -N localhost:8000/live/v1/live -H "$auth" -d '{"table": "tasks"}'.
It uses the embedded PostgreSQL, or the database in HEADWATER_URL.
"""

import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import jwt
from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPBasic, HTTPBasicCredentials
from pydantic import BaseModel

from headwater import (
    AccessRequest,
    Context,
    Filter,
    Headwater,
    Identity,
    MutationContext,
    Refused,
    c,
)

SECRET = os.environ.get("TASKS_SECRET", "thirty-two bytes or more, and only for the example")
PASSWORDS = {"ann": "tea", "bob": "pot"}  # only for the example, too

hw = Headwater(auth_secret=SECRET)


class Task(BaseModel):
    id: int
    title: str


@hw.query(key="id")
async def open_tasks(ctx: Context) -> list[Task]:
    mine = "select id, title from tasks where owner = %s and not done order by id"
    return await ctx.fetch(mine, ctx.user)


@hw.mutation
async def add_task(ctx: MutationContext, title: str) -> int:
    if not title.strip():
        raise Refused("a task needs a title", code="title")
    add = "insert into tasks (owner, title) values (%s, %s) returning id"
    return int(await ctx.fetch_value(add, ctx.user, title))


@hw.authorize
def own_rows(identity: Identity, request: AccessRequest) -> bool | Filter:
    """For live queries and change feeds. Queries and mutations decide for themselves, by ctx."""
    return c.owner == identity.user if request.table == "tasks" else False


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with hw:
        async with hw.connection() as connection:
            await connection.execute(
                "create table if not exists tasks (id int generated always as identity primary key,"
                " owner text not null, title text not null, done boolean not null default false)"
            )
        await hw.enable("tasks")
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/live", hw.asgi())


@app.post("/token", response_class=PlainTextResponse)
def token(who: Annotated[HTTPBasicCredentials, Depends(HTTPBasic())]) -> str:
    expected = PASSWORDS.get(who.username, secrets.token_hex())
    if not secrets.compare_digest(who.password.encode(), expected.encode()):
        raise HTTPException(401, "wrong name or password")
    claims = {"sub": who.username, "exp": int(time.time()) + 3600}
    return jwt.encode(claims, SECRET, algorithm="HS256")
