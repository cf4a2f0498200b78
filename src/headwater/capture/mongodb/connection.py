"""The connection to a MongoDB server: its URL, its options, and what the server is.

One client serves a source; it opens connections when it needs them. Values are decoded so that
nothing is lost and nothing fails: dates as milliseconds, invalid UTF-8 replaced, binary values as
they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo import AsyncMongoClient
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)

from headwater.capture.kinds import split_url
from headwater.errors import ConfigError

Document: TypeAlias = dict[str, Any]
Database: TypeAlias = AsyncDatabase[Document]

CODEC: CodecOptions[Document] = CodecOptions(
    document_class=dict,
    unicode_decode_error_handler="replace",
    datetime_conversion=DatetimeConversion.DATETIME_MS,
)

_DEFAULTS: dict[str, Any] = {
    "appname": "headwater",
    "serverSelectionTimeoutMS": 10_000,
    "connectTimeoutMS": 10_000,
}
"""Where the URL does not say otherwise."""


class Batch(NamedTuple):
    """A reply with documents, of the change stream or of a copy."""

    number: int
    """Counts the replies to one operation."""
    first: bool
    """Whether it is the reply that opened the cursor, which may be empty although events follow."""
    size: int
    token: Mapping[str, Any] | None
    """From where the stream continues after this batch."""
    read_at: Any
    """The cluster time of a snapshot read."""


class Replies(CommandListener):
    """Remembers the last reply to each operation that has one of our comments.

    PyMongo gives documents one at a time. A source also needs the end of a batch, the token after
    an empty one and the time of a snapshot read, and this is the public way to get them.
    """

    def __init__(self) -> None:
        self._comments: dict[int, str] = {}
        self._batches: dict[str, Batch] = {}

    def batch(self, comment: str) -> Batch | None:
        return self._batches.get(comment)

    def forget(self, comment: str) -> None:
        self._batches.pop(comment, None)

    def started(self, event: CommandStartedEvent) -> None:
        comment = event.command.get("comment")
        if isinstance(comment, str) and event.command_name != "killCursors":
            self._comments[event.request_id] = comment

    def succeeded(self, event: CommandSucceededEvent) -> None:
        comment = self._comments.pop(event.request_id, None)
        cursor = event.reply.get("cursor")
        if comment is None or not cursor:
            return
        documents = cursor["firstBatch"] if "firstBatch" in cursor else cursor.get("nextBatch", ())
        last = self._batches.get(comment)
        self._batches[comment] = Batch(
            last.number + 1 if last else 1,
            "firstBatch" in cursor,
            len(documents),
            cursor.get("postBatchResumeToken"),
            cursor.get("atClusterTime") or (last.read_at if last else None),
        )

    def failed(self, event: CommandFailedEvent) -> None:
        self._comments.pop(event.request_id, None)


class Server(NamedTuple):
    """What the server is."""

    version: tuple[int, ...]
    replica_set: bool
    sharded: bool

    @property
    def splits(self) -> bool:
        """Whether it can split an event that is larger than 16 MB."""
        return self.version >= (6, 0, 9)


class Connection:
    """The client of one source, opened at the first use."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.database_name = database_name(url)
        self.replies = Replies()
        self.warnings: list[str] = []
        """What the driver says of the URL's options."""
        self._client: AsyncMongoClient[Document] | None = None
        self._server: Server | None = None

    @property
    def client(self) -> AsyncMongoClient[Document]:
        if self._client is None:
            given = {name.lower() for name, _ in parse_qsl(urlsplit(self.url).query)}
            defaults = {n: value for n, value in _DEFAULTS.items() if n.lower() not in given}
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._client = AsyncMongoClient(
                    self.url, event_listeners=[self.replies], **defaults
                )
            self.warnings = sorted(
                {str(w.message) for w in caught if issubclass(w.category, UserWarning)}
            )
        return self._client

    @property
    def database(self) -> Database:
        return self.client.get_database(self.database_name, codec_options=CODEC)

    async def server(self) -> Server:
        """Asked once: a server does not become another while a source runs."""
        if self._server is None:
            hello = await self.client.admin.command("hello")
            build = await self.client.admin.command("buildInfo")
            self._server = Server(
                tuple(build.get("versionArray", (0, 0))[:3]),
                "setName" in hello,
                hello.get("msg") == "isdbgrid",
            )
        return self._server

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def database_name(url: str) -> str:
    """
    >>> database_name("mongodb+srv://me@cluster.example.com/shop?retryWrites=true")
    'shop'
    """
    parts = split_url(url)
    name = unquote(parts.path.lstrip("/"))
    if parts.scheme not in ("mongodb", "mongodb+srv") or not name or "/" in name:
        raise ConfigError(
            "the URL of a MongoDB source must name its database",
            hint="mongodb://USER:PASSWORD@HOST/DATABASE; add ?authSource=admin where the user is"
            " defined in another database.",
        )
    return name
