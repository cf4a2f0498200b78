"""Keys that an issuer publishes (JWKS), behind a URL or in a file.

Fetched when first needed, when they are too old, and when a token names an unknown key; never more
often than the cooldown allows. A failed fetch leaves the keys as they were. Without any keys the
error is `Unavailable`, never `Unauthorized`: the client is not at fault.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import httpx

from headwater.errors import ConfigError, Unavailable
from headwater.gateway.auth import keys
from headwater.gateway.auth.keys import Key
from headwater.limits import (
    JWKS_BYTES_MAX,
    JWKS_COOLDOWN_SECONDS,
    JWKS_REFRESH_SECONDS,
    JWKS_TIMEOUT_SECONDS,
)
from headwater.settings.checks import read_file
from headwater.settings.groups import AuthSettings
from headwater.tasks import ended

logger = logging.getLogger(__name__)


class KeySet:
    """The keys of the last fetch. `clock` measures time differences only."""

    def __init__(
        self,
        load: Callable[[], Awaitable[bytes]],
        algorithms: Sequence[str] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.known: tuple[Key, ...] = ()
        self._load = load
        self._algorithms = algorithms
        self._clock = clock
        self._fetching: asyncio.Task[None] | None = None
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        self._failed = False

    @classmethod
    def from_settings(cls, settings: AuthSettings) -> KeySet | None:
        """A file is read now, a URL when the first token arrives."""
        source = settings.jwks
        if source is None:
            return None
        if settings.jwks_is_url:
            return cls(partial(_fetch, source), settings.algorithms)
        key_set = cls(partial(_read, source), settings.algorithms)
        try:
            key_set.put(read_file("[auth] jwks", source))
        except keys.NotAKey as error:
            raise ConfigError(
                f"[auth] jwks: {source} is not a key set: {error}",
                hint='It looks like {"keys": [{"kty": "RSA", "kid": "…", "n": "…", "e": "AQAB"}]}.',
            ) from error
        return key_set

    def put(self, data: bytes) -> None:
        """Use these keys from now on; keys.NotAKey for a document that is not a key set."""
        self.known = keys.restricted(keys.from_key_set(data), self._algorithms)
        self._fetched_at = self._clock()
        self._failed = False

    async def fitting(self, algorithm: str, id: str | None) -> list[Key]:
        """The keys that may have signed a token with this header; none where its `kid` is unknown
        or the algorithm is not that of the key."""
        if algorithm.startswith("HS"):
            return []  # this is known without a fetch
        if self._is_old and not (self.known and self._fetching is not None):
            await self._refresh()
        if id is not None and all(key.id != id for key in self.known):
            await self._refresh()
        found = [key for key in self.known if key.fits(algorithm, id)]
        if not found and self._failed:
            raise Unavailable(
                "the key set that tokens are verified with cannot be fetched",
                hint="Try again. The gateway's log has the reason; the setting is [auth] jwks.",
            )
        return found

    @property
    def _is_old(self) -> bool:
        return self._fetched_at is None or self._ago(self._fetched_at) >= JWKS_REFRESH_SECONDS

    def _ago(self, moment: float) -> float:
        return self._clock() - moment

    async def _refresh(self) -> None:
        """Fetch the keys, unless that was tried within the cooldown. The fetch does not end with
        the client that caused it, and clients share one fetch."""
        if self._fetching is None:
            if self._tried_at is not None and self._ago(self._tried_at) < JWKS_COOLDOWN_SECONDS:
                return
            self._tried_at = self._clock()
            self._fetching = asyncio.create_task(self._fetch())
        await asyncio.shield(self._fetching)

    async def _fetch(self) -> None:
        try:
            self.put(await self._load())
        except (httpx.HTTPError, httpx.InvalidURL, OSError, keys.NotAKey) as error:
            self._failed = True
            reason = str(error) or type(error).__name__
            logger.warning("the key set ([auth] jwks) cannot be fetched: %s", reason)
        except Exception:
            self._failed = True
            logger.exception("the key set ([auth] jwks) cannot be fetched")
        finally:
            self._fetching = None

    async def close(self) -> None:
        """Cancel a fetch that is running."""
        if self._fetching is not None:
            await ended(self._fetching)


async def _read(path: str) -> bytes:
    return await asyncio.to_thread(Path(path).read_bytes)


async def _fetch(url: str) -> bytes:
    """Redirects are not followed: the keys come from the URL in the setting only. Compressed
    responses are refused: a few hundred bytes can decompress to gigabytes."""
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    async with (
        asyncio.timeout(JWKS_TIMEOUT_SECONDS),
        httpx.AsyncClient(timeout=JWKS_TIMEOUT_SECONDS) as client,
        client.stream("GET", url, headers=headers) as response,
    ):
        if response.status_code != httpx.codes.OK:
            raise keys.NotAKey(f"the answer has status {response.status_code}")
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise keys.NotAKey(f"the answer has the encoding {encoding!r:.40}, not identity")
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > JWKS_BYTES_MAX:
                raise keys.NotAKey(f"it has more than {JWKS_BYTES_MAX} bytes")
    return bytes(data)
