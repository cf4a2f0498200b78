"""Users that see only their own rows of a table: the role that they read as, the role that queries
run under, which has no password here, and random writes to such a table."""

from __future__ import annotations

import json
import random

from headwater.hub.subscriptions.subscriber import Access
from headwater.settings import Settings

ROLE, QUESTIONS = "hw_lag_reader", "hw_lag_questions"
READERS = (
    *(
        f"do $$ begin create role {role} {options};"
        " exception when duplicate_object then null; end $$"
        for role, options in ((ROLE, "nologin"), (QUESTIONS, "login noinherit"))
    ),
    f"grant {ROLE} to {QUESTIONS}",
    "create function me() returns int language sql stable as"
    " $$ select (current_setting('request.jwt.claims')::json ->> 'sub')::int $$",
)
"""Creates both roles, and a function for policies: the number of the user who asks."""


def asking(url: str) -> Settings:
    return Settings(question_url=url.replace("postgres@", f"{QUESTIONS}@"))


def user(number: int) -> Access:
    return Access(role=ROLE, claims=json.dumps({"sub": number}))


def random_write(chance: random.Random, table: str = "notes") -> str:
    """A random write to a table with the columns `id`, `owner` and `rank`, and perhaps others."""
    key, owner, rank = chance.randint(1, 45), chance.randint(0, 3), chance.randint(0, 30)
    return chance.choice(
        [
            f"update {table} set owner = {owner} where id = {key}",
            f"update {table} set rank = {rank} where id = {key}",
            f"update {table} set owner = {owner}, rank = {rank} where id % 5 = {key % 5}",
            f"delete from {table} where id = {key}",
            f"insert into {table} (id, owner, rank) values ({key}, {owner}, {rank})"
            " on conflict (id) do update set rank = excluded.rank",
        ]
    )
