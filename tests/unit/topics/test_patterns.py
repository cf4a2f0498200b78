"""Names and patterns: which names match, and that patterns have no other syntax."""

from __future__ import annotations

from datetime import date
from typing import Any
from uuid import UUID

import pytest

from headwater.errors import ConfigError, InvalidQuery, NotFound
from headwater.topics.definitions import TopicDefinition, Topics
from headwater.topics.patterns import Pattern, check_name


@pytest.mark.parametrize(
    ("pattern", "name", "places"),
    [
        ("chat:{id}", "chat:42", {"id": "42"}),
        ("chat:{id}", "chat:%", {"id": "%"}),
        ("chat:{id}", "chat:a b", {"id": "a b"}),
        ("chat:{id}", "chat:.*", {"id": ".*"}),
        ("chat:{id}", "chat:", None),
        ("chat:{id}", "chat:42:7", None),
        ("chat:{id}", "Chat:42", None),
        ("chat:{id}", "xchat:42", None),
        ("chat:{id}", "chat:42,org:1", None),
        ("chat:{id}", "chat:42\norg:1", None),
        ("chat:{id}", "chat:42\n", None),
        ("chat:{id}", "chat:\x00", None),
        ("chat:{id}", "chat:\u2028", None),
        ("chat:{id}", "chat:" + "x" * 100, {"id": "x" * 100}),
        ("chat:{id}", "chat:" + "x" * 101, None),
        ("chat:{id}", "chat:" + "x" * 10_000, None),
        ("org:{org}:chat:{id}", "org:7:chat:42", {"org": "7", "id": "42"}),
        ("org:{org}:chat:{id}", "org:7:x:chat:42", None),
        ("a.b:{id}", "axb:1", None),
        ("news", "news", {}),
        ("news", "newsletter", None),
        ("chat:{id}:end", "chat:42:end", {"id": "42"}),
    ],
)
def test_match(pattern: str, name: str, places: dict[str, str] | None) -> None:
    assert Pattern(pattern).match(name) == places


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"id": 42}, "chat:42"),
        ({"id": "a"}, "chat:a"),
        ({"id": True}, "chat:true"),
        ({"id": UUID(int=7)}, "chat:00000000-0000-0000-0000-000000000007"),
        ({"id": date(2026, 1, 2)}, "chat:2026-01-02"),
        ({"id": None}, None),
        ({}, None),
        ({"id": ""}, None),
        ({"id": "42,org:1"}, None),
        ({"id": "42:7"}, None),
        ({"id": "42\n"}, None),
        ({"id": [42]}, None),
        ({"id": {"a": 1}}, None),
        ({"id": "x" * 10_000}, None),
    ],
)
def test_fill(values: dict[str, Any], name: str | None) -> None:
    """A value of a row fills only its own place in the name of a topic."""
    assert Pattern("chat:{id}").fill(values) == name


@pytest.mark.parametrize(
    "text",
    [
        "", "chat:{}", "chat:{id", "chat:id}", "chat:{a b}", "chat:{id}:{id}", "chat:{a}{b}",
        "chat:{a}-{b}", "chat,{id}", "chat {id}", "chat:{id}\n", "x" * 201, "chat:{{id}}", "%",
    ],
)  # fmt: skip
def test_invalid_patterns(text: str) -> None:
    with pytest.raises(ConfigError, match="not a valid pattern"):
        Pattern(text)


@pytest.mark.parametrize("name", ["chat:42", "%", "a b", "é", "x" * 200, "'; drop table x; --"])
def test_names(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    "name", ["", "x" * 201, "a,b", "a\nb", "a\x00", "\x85", "\u2028", "\ud800", "x" * 10_000]
)
def test_invalid_names(name: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        check_name(name)
    assert caught.value.path == "topic"
    assert len(str(caught.value)) < 300


# ------------------------------------------------------------------------ definitions


async def chat(ctx: Any, id: int) -> bool:
    return id == 42


def test_the_first_pattern_that_matches_counts() -> None:
    topics = Topics()
    special = topics.add(TopicDefinition("chat:all", poke=True))
    general = topics.add(TopicDefinition("chat:{id}", entity="messages", access=chat))
    assert topics.find("chat:all") == (special, {})
    assert topics.find("chat:42") == (general, {"id": "42"})
    assert general.read({"id": "42"}).values == {"id": 42}
    with pytest.raises(InvalidQuery, match=r"topic.id: expected int"):
        general.read({"id": "x"})
    with pytest.raises(NotFound):
        topics.find("room:1")
    with pytest.raises(InvalidQuery):
        topics.find("chat:42,org:1")
    with pytest.raises(ConfigError, match="matches the same names"):
        topics.add(TopicDefinition("chat:{chat_id}", poke=True))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "exactly one of"),
        ({"entity": "a", "table": "b"}, "exactly one of"),
        ({"entity": "a", "poke": True}, "exactly one of"),
        ({"poke": True, "parents": {"a": "b"}}, "no parents"),
        ({"entity": "a", "access": lambda ctx: True}, "takes nothing"),
        ({"entity": "a", "access": lambda ctx, other: True}, "takes other"),
        ({"entity": "a", "access": lambda: True}, "takes no context"),
    ],
)
def test_invalid_declarations(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        TopicDefinition("chat:{id}", **options)
    with pytest.raises(ConfigError, match="no parameter"):
        TopicDefinition("news", table="messages")


def test_as_a_decorator() -> None:
    definition = TopicDefinition("chat:{id}", entity="messages")
    assert definition(chat) is chat
    assert definition.access is not None
    with pytest.raises(ConfigError, match="already"):
        definition(chat)
