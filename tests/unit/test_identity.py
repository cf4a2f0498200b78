"""What an identity says of itself."""

from __future__ import annotations

from headwater.identity import ANONYMOUS, Identity, anonymous
from headwater.settings.groups import AuthSettings


def test_a_refreshed_token_has_the_same_claims_text() -> None:
    old = Identity(claims={"sub": "ann", "exp": 1, "iat": 1, "nbf": 1, "jti": "a", "org": {"x": 1}})
    new = Identity(claims={"org": {"x": 1}, "jti": "b", "exp": 2, "sub": "ann"})
    assert old.claims_json == new.claims_json == '{"org":{"x":1},"sub":"ann"}'


def test_only_the_outer_claims_are_of_one_token() -> None:
    assert Identity(claims={"app": {"exp": 1}}).claims_json == '{"app":{"exp":1}}'


def test_accounts_do_not_mix() -> None:
    accounts = {
        Identity(user="c", tenant="a/b").account,
        Identity(user="b/c", tenant="a").account,
        Identity(user="c").account,
        Identity(user="c", tenant="x").account,
    }
    assert len(accounts) == 4
    assert ANONYMOUS.account is None


def test_anonymous_sessions_read_as_the_role_of_the_settings() -> None:
    assert anonymous(AuthSettings()) == ANONYMOUS
    assert anonymous(AuthSettings(role="web")) == Identity(role="web")
