"""A chat in which an answer appears word by word, for every viewer.

    uvicorn chat:app --timeout-graceful-shutdown 5
    python chat.py
    curl localhost:8000/chats/1 -d 'Why is the sky blue?'

The second command is a viewer; run it in as many terminals as you like, and open
http://localhost:8000 in as many browsers. The answer does not come from a model, but like one: a
few tokens at a time, written into one row, whose changes are the topic's signals. Every viewer is
sent the row as it grows, read once for all of them. It uses the embedded PostgreSQL, or the
database in HEADWATER_URL.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.routing import Mount, Route

from headwater import Context, Headwater, connect

hw = Headwater()


@hw.topic("chat:{chat_id}", table="messages")
async def chat(ctx: Context, chat_id: int) -> bool:
    """Who may follow it. In an application of yours: the members, by `ctx.user`."""
    return bool(await ctx.fetch_value("select true from chats where id = %s", chat_id))


@hw.query
async def history(ctx: Context, chat: int) -> list[dict[str, Any]]:
    return await ctx.fetch("select * from messages where chat_id = %s order by id", chat)


async def ask(request: Request) -> PlainTextResponse:
    """Store the question, and start the answer."""
    chat, question = request.path_params["chat"], (await request.body()).decode()
    async with hw.connection() as connection:
        cursor = await connection.execute(
            "insert into messages (chat_id, author, content, state) values"
            " (%(chat)s, 'you', %(question)s, 'done'), (%(chat)s, 'model', '', 'waiting')"
            " returning id",
            {"chat": chat, "question": question},
        )
        _, (answer,) = await cursor.fetchall()
    task = asyncio.create_task(reply(answer, question))
    answering.add(task)
    task.add_done_callback(answering.discard)
    return PlainTextResponse(f"See http://{request.url.netloc}\n", status_code=202)


answering: set[asyncio.Task[None]] = set()


async def reply(id: int, question: str) -> None:
    async with hw.text_stream("messages", id=id) as out:
        async for token in model(question):
            out.append(token)


async def model(question: str) -> AsyncIterator[str]:
    """An answer to any question, a hundred tokens a second."""
    answer = f"You ask: {question} That is a deep question, and it is still open."
    for token in answer:
        await asyncio.sleep(0.01)
        yield token


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with hw:
        async with hw.connection() as connection:
            await connection.execute(TABLES)
        await hw.enable("messages")
        yield
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)


TABLES = """
    create table if not exists chats (id int primary key);
    insert into chats values (1), (2) on conflict do nothing;
    create table if not exists messages (
      id bigint generated always as identity primary key,
      chat_id int not null references chats, author text not null, content text not null,
      state text not null);
    create index if not exists messages_of_chat on messages (chat_id)
"""

PAGE = """
<!doctype html>
<title>Chat</title>
<main></main>
<form><input name="text" placeholder="Ask something" autofocus></form>
<script>
  const sent = new Set();
  function show({ id, author, content, state }) {
    let line = document.getElementById(id);
    if (!line) {
      line = document.createElement("p");
      line.id = id;
      document.querySelector("main").append(line);
    }
    line.textContent = `${author}: ${content}${state == "streaming" ? " …" : ""}`;
  }
  const source = new EventSource("live/v1/stream?topics=chat:1");
  source.addEventListener("topic", (event) => {
    for (const op of JSON.parse(event.data).ops) {
      sent.add(op.key[0]);
      show(op.row);
    }
  });
  // The earlier messages. Those that the topic has sent meanwhile are newer.
  source.addEventListener("subscribed", async () => {
    const body = JSON.stringify({ chat: 1 });
    const answer = await fetch("live/v1/query/history", { method: "POST", body });
    (await answer.json()).value.filter((row) => !sent.has(row.id)).forEach(show);
  });
  document.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    fetch("chats/1", { method: "POST", body: event.target.text.value });
    event.target.reset();
  });
</script>
"""


async def page(request: Request) -> HTMLResponse:
    return HTMLResponse(PAGE)


app = Starlette(
    routes=[
        Route("/", page),
        Route("/chats/{chat:int}", ask, methods=["POST"]),
        Mount("/live", hw.asgi()),
    ],
    lifespan=lifespan,
)


async def watch(url: str) -> None:
    """A viewer in a terminal: each message, and again whenever it has grown."""
    async with connect(url) as live, live.topic("chat:1") as chat:
        chat.fill("messages", await live.query("history", chat=1))
        print("watching chat:1", flush=True)
        print_messages(chat.rows("messages"))
        async for ops in chat:
            changed = {op.key for op in ops}
            print_messages(row for row in chat.rows("messages") if (row["id"],) in changed)


def print_messages(rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        print(f"{row['author']}: {row['content']} ({row['state']})", flush=True)


if __name__ == "__main__":
    asyncio.run(watch(os.environ.get("CHAT_URL", "http://localhost:8000/live")))
