"""Live queries beside a Django project, in one process.

    uvicorn django_app:application --timeout-graceful-shutdown 5
    curl -N localhost:8000/live/v1/live -d '{"table": "visits", "order": ["id desc"], "limit": 5}'
    curl localhost:8000/

Django answers everything but /live, which is Headwater's. In a project of yours, this is what
asgi.py becomes; settings and urls stay where they are. It uses the embedded PostgreSQL, or the
database in HEADWATER_URL.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpRequest, HttpResponse
from django.urls import path
from starlette.applications import Starlette
from starlette.routing import Mount

from headwater import Headwater

if not settings.configured:
    settings.configure(
        ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="only for the example"
    )
    django.setup()

hw = Headwater()


async def home(request: HttpRequest) -> HttpResponse:
    async with hw.connection() as connection:
        await connection.execute("insert into visits (path) values (%s)", (request.path,))
    return HttpResponse("Django is here.\n")


urlpatterns = [path("", home)]


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with hw:
        async with hw.connection() as connection:
            await connection.execute(
                "create table if not exists visits"
                " (id int generated always as identity primary key, path text not null)"
            )
        await hw.enable("visits")
        yield


application = Starlette(
    routes=[Mount("/live", hw.asgi()), Mount("/", get_asgi_application())],
    lifespan=lifespan,
)
