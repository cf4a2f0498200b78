"""Live queries beside a Django project, in one process.

    uvicorn django_app:application

Django answers everything but /live, which is Headwater's. In a project of yours, this is what
asgi.py becomes; settings and urls stay where they are.
"""

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


def home(request: HttpRequest) -> HttpResponse:
    return HttpResponse("Django is here.")


urlpatterns = [path("", home)]

hw = Headwater()

application = Starlette(
    routes=[Mount("/live", hw.asgi()), Mount("/", get_asgi_application())],
    lifespan=hw.lifespan,
)
