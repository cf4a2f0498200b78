"""The keys that verify tokens, and the algorithms that each of them allows.

The kind of a key decides, never the token: a shared secret verifies HS… only, an RSA key RS… and
PS… only, so that a public key can never be used as a secret. The keys of a key set differ in their
`kid`, which is only compared: it is never a path, a URL or part of a query. Symmetric keys in a key
set are not used, because key sets are published.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jwt
import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from cryptography.x509 import load_pem_x509_certificate

from headwater.errors import ConfigError
from headwater.limits import JWKS_KEYS_MAX, RSA_BITS_MIN

logger = logging.getLogger(__name__)

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVES = {"secp256r1": "ES256", "secp256k1": "ES256K", "secp384r1": "ES384", "secp521r1": "ES512"}
_SECRETS = (("HS256", 32), ("HS384", 48), ("HS512", 64))
"""The fewest bytes that a secret must have for each algorithm: those of the hash (RFC 7518
§3.2)."""


class Key(msgspec.Struct, frozen=True):
    """`material` is for the JWT library; `id` is None for a key that is not from a key set."""

    material: Any
    algorithms: frozenset[str]
    id: str | None = None

    def fits(self, algorithm: str, id: str | None) -> bool:
        """Whether a token with this header may have been signed with this key."""
        named = self.id is None or id is None or self.id == id
        return named and algorithm in self.algorithms


class NotAKey(ValueError):
    """Why a key cannot be used. The message never contains the key."""


def from_secret(secret: str) -> Key:
    size = len(secret.encode())
    fitting = frozenset(name for name, least in _SECRETS if size >= least)
    try:
        jwt.get_algorithm_by_name("HS256").prepare_key(secret)
    except jwt.InvalidKeyError as error:
        raise ConfigError(
            "[auth] secret: this is a public key or a key set, not a secret",
            hint="Set it as [auth] public_key or jwks.",
        ) from error
    return Key(secret.encode(), fitting)


def from_pem(text: str) -> Key:
    """A public key, or the key in a certificate."""
    if "PRIVATE KEY-----" in text:
        raise ConfigError(
            "[auth] public_key: this is a private key, which the gateway does not need",
            hint="Set the public one: openssl pkey -in private.pem -pubout",
        )
    try:
        if "BEGIN CERTIFICATE" in text:
            material: Any = load_pem_x509_certificate(text.encode()).public_key()
        else:
            material = load_pem_public_key(text.encode())
        return Key(material, _algorithms_of(material))
    except NotAKey as error:
        raise ConfigError(f"[auth] public_key: {error}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            "[auth] public_key: not a public key in PEM form",
            hint="It begins with -----BEGIN PUBLIC KEY----- or is a file with that.",
        ) from error


def from_key_set(data: bytes) -> tuple[Key, ...]:
    """The keys of a JWK set that verify signatures; NotAKey if there is none.

    Keys that cannot be used are left out: a provider may publish kinds that Headwater does not
    know.
    """
    try:
        listed = msgspec.json.decode(data, type=_KeySet).keys
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotAKey("not a JSON object with a list of keys") from error
    if len(listed) > JWKS_KEYS_MAX:
        logger.warning(
            "the key set has %d keys; only the first %d are used", len(listed), JWKS_KEYS_MAX
        )
    keys: list[Key] = []
    for number, parameters in enumerate(listed[:JWKS_KEYS_MAX]):
        try:
            keys.append(from_jwk(parameters))
        except NotAKey as error:
            logger.warning("key %d of the key set is not used: %s", number, error)
    if not keys:
        raise NotAKey("no key in it verifies signatures")
    return tuple(keys)


def restricted(keys: Sequence[Key], algorithms: Sequence[str]) -> tuple[Key, ...]:
    """The keys with the algorithms that the setting allows; with all of theirs if it names none."""
    if not algorithms:
        return tuple(keys)
    return tuple(
        msgspec.structs.replace(key, algorithms=key.algorithms & set(algorithms)) for key in keys
    )


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


def from_jwk(parameters: dict[str, Any]) -> Key:
    """One key of a set; NotAKey if it does not verify tokens."""
    if parameters.get("kty") == "oct":
        raise NotAKey("it is symmetric: set a shared secret as [auth] secret")
    if parameters.get("use") not in (None, "sig"):
        raise NotAKey("it is for encryption")
    purposes = parameters.get("key_ops")
    if isinstance(purposes, list) and "verify" not in purposes:
        raise NotAKey("it is not for verifying")
    id = parameters.get("kid")
    if not isinstance(id, str | None):
        raise NotAKey("its kid is not a text")
    material = _material(parameters)
    fitting = _algorithms_of(material)
    if (named := parameters.get("alg")) is not None:
        fitting &= {named} if isinstance(named, str) else set()
        if not fitting:
            raise NotAKey("its alg does not fit its kind")
    return Key(material, fitting, id)


def _material(parameters: dict[str, Any]) -> Any:
    try:
        # Without `alg`, because the library would prefer it to the kind of the key.
        plain = {name: value for name, value in parameters.items() if name not in ("alg", "d")}
        return jwt.PyJWK(plain).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise NotAKey("its kind is unknown or it is damaged") from error


def _algorithms_of(material: Any) -> frozenset[str]:
    match material:
        case rsa.RSAPublicKey():
            if material.key_size < RSA_BITS_MIN:
                raise NotAKey(f"an RSA key of fewer than {RSA_BITS_MIN} bits can be broken")
            return frozenset(_RSA)
        case ec.EllipticCurvePublicKey() if material.curve.name in _CURVES:
            return frozenset({_CURVES[material.curve.name]})
        case ed25519.Ed25519PublicKey() | ed448.Ed448PublicKey():
            return frozenset({"EdDSA"})
    raise NotAKey("it is of a kind that signs no tokens")
