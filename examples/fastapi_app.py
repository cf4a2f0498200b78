"""Live queries in a FastAPI application.

    uvicorn fastapi_app:app --timeout-graceful-shutdown 5
    curl -N localhost:8000/live/v1/live -d '{"table": "tasks", "order": ["id desc"], "limit": 5}'
    curl localhost:8000/tasks -H 'content-type: application/json' -d '{"title": "Sweep"}'

It uses the embedded PostgreSQL, or the database in HEADWATER_URL.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from pydantic import BaseModel

from headwater import Headwater

hw = Headwater()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with hw:
        async with hw.connection() as connection:
            await connection.execute(
                "create table if not exists tasks"
                " (id int generated always as identity primary key, title text not null)"
            )
        await hw.enable("tasks")
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/live", hw.asgi())


class Task(BaseModel):
    title: str


@app.post("/tasks", status_code=201)
async def add_task(task: Task) -> dict[str, int]:
    async with hw.connection() as connection:
        cursor = await connection.execute(
            "insert into tasks (title) values (%s) returning id", (task.title,)
        )
        row = await cursor.fetchone()
        assert row is not None
        return {"id": row[0]}
