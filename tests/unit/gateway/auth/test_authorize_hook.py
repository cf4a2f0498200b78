"""What an answer of the authorize hook means. Every failure means a refusal."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from headwater.errors import ConfigError, Forbidden
from headwater.gateway.auth import authorize_hook as module
from headwater.gateway.auth.authorize_hook import AccessRequest, Allow, check_hook, decide
from headwater.hub.subscriptions.subscriber import Access
from headwater.identity import ANONYMOUS, Identity
from headwater.live.filters.filter import EVERYTHING, Filter, c

ANN = Identity("ann", "acme", "clerk", {"sub": "ann", "exp": 5})
CLAIMS = '{"sub":"ann"}'


def of(table: str) -> AccessRequest:
    return AccessRequest(kind="live", table=table)


async def test_without_a_hook_all_is_allowed() -> None:
    assert await decide(None, ANN, of("orders")) == Access("clerk", CLAIMS, EVERYTHING)
    assert await decide(None, ANONYMOUS, of("orders")) == Access()


async def test_yes_no_and_some_rows() -> None:
    def authorize(identity: Identity, request: AccessRequest) -> bool | Filter:
        return (
            c.tenant == identity.tenant if request.table == "orders" else request.table == "regions"
        )

    assert await decide(authorize, ANN, of("orders")) == Access("clerk", CLAIMS, c.tenant == "acme")
    assert await decide(authorize, ANN, of("regions")) == Access("clerk", CLAIMS, EVERYTHING)
    with pytest.raises(Forbidden, match="you may not read table users") as caught:
        await decide(authorize, ANN, of("users"))
    assert caught.value.code == "forbidden"


@pytest.mark.parametrize("answer", [True, (c.a == 1) | ~c.b.is_null(), c.a.in_(1, 2), EVERYTHING])
async def test_a_coroutine_function(answer: bool | Filter) -> None:
    async def authorize(identity: Identity, request: AccessRequest) -> bool | Filter:
        await asyncio.sleep(0)
        return answer

    expected = EVERYTHING if answer is True else answer
    assert (await decide(authorize, ANN, of("orders"))).where == expected


async def refused(hook: Any, caplog: pytest.LogCaptureFixture) -> str:
    """What the gateway's log says under the number that is in the client's error."""
    with pytest.raises(Forbidden, match="could not be decided") as caught:
        await decide(hook, ANN, of("orders"))
    assert caught.value.code == "authorize_failed"
    number = str(caught.value).partition("error ")[2].rstrip(")")
    assert f"error {number}: authorize('ann', 'orders')" in caplog.text
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "secret" not in f"{caught.value} {caught.value.hint}"
    return caplog.text


async def test_a_hook_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    def authorize(identity: Identity, request: AccessRequest) -> bool:
        raise RuntimeError("the secret of the database is hunter2")

    assert "hunter2" in await refused(authorize, caplog)


async def test_a_coroutine_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    async def authorize(identity: Identity, request: AccessRequest) -> bool:
        raise KeyError("secret")

    assert "KeyError" in await refused(authorize, caplog)


@pytest.mark.parametrize("answer", [None, 1, "yes", [], {"and": []}, ["a", "=", 1], c.a, object()])
async def test_any_other_answer(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    logged = await refused(lambda identity, request: answer, caplog)
    assert f"returned {type(answer).__name__}; it must be True, False, a filter or Allow" in logged


async def test_a_hook_that_never_answers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AUTHORIZE_SECONDS_MAX", 0.01)

    async def authorize(identity: Identity, request: AccessRequest) -> bool:
        await asyncio.Event().wait()
        return True

    assert "TimeoutError" in await refused(authorize, caplog)


async def test_a_cancelled_request_is_not_denied() -> None:
    """A cancelled request is cancelled, not forbidden."""
    entered = asyncio.Event()

    async def authorize(identity: Identity, request: AccessRequest) -> bool:
        entered.set()
        await asyncio.Event().wait()
        return True

    task = asyncio.create_task(decide(authorize, ANN, of("orders")))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


HOUR = timedelta(hours=1)


async def test_the_reach_of_the_history_has_a_hook_of_its_own() -> None:
    async def history(answer: Any, setting: timedelta | None) -> timedelta | None:
        return (await decide(lambda *_: answer, ANN, of("orders"), history=setting)).history

    assert await history(True, HOUR) == HOUR
    assert await history(c.a == 1, HOUR) == HOUR
    assert await history(Allow(), None) is None
    assert await history(Allow(history=timedelta()), None) == timedelta()
    assert await history(Allow(history=timedelta.max), HOUR) is None
    allowed = await decide(lambda *_: Allow(c.a == 1, HOUR), ANN, of("orders"))
    assert (allowed.where, allowed.history) == (c.a == 1, HOUR)


def test_a_hook_of_the_old_form_is_recognised() -> None:
    def annotated(identity: Identity, name: str) -> bool:
        return True

    for hook in (annotated, lambda identity, table: True):
        with pytest.raises(ConfigError, match="takes an AccessRequest") as caught:
            check_hook(hook)
        assert "request.table" in str(caught.value.hint)
    check_hook(lambda identity, request: True)
    check_hook(lambda *asked: True)
