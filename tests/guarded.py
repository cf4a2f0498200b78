"""Users who see their own rows: the role that they read as, and the one that questions are asked
over, which has no password here."""

from __future__ import annotations

import json

from headwater.hub.subscriber import Access
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
