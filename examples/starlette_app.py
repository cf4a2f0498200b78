"""Live queries in a Starlette application, each user seeing their own rows.

    uvicorn starlette_app:app

Who somebody is comes from the token; which rows are theirs, from the rule below.
"""

import os

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from headwater import Filter, Headwater, Identity, c

SECRET = os.environ.get("NOTES_SECRET", "a secret of thirty-two bytes or more, please")

hw = Headwater(auth_secret=SECRET)


@hw.authorize
def own_notes(identity: Identity, table: str) -> bool | Filter:
    if table == "notes":
        return c.owner == identity.user
    return False


async def home(request: Request) -> PlainTextResponse:
    return PlainTextResponse("GET /live/v1/live?q=… with a token follows your notes.\n")


app = Starlette(
    routes=[Route("/", home), Mount("/live", hw.asgi())],
    lifespan=hw.lifespan,
)
