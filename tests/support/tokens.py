"""Keys and tokens as an issuer makes them, and as an attacker would."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

NOW = 1_800_000_000.0
SECRET = "a shared secret that is long enough for every kind of HS token there is"
CLAIMS: dict[str, Any] = {"sub": "ann", "exp": int(NOW) + 600}


def rsa_key(name: str = "first", bits: int = 2_048) -> rsa.RSAPrivateKey:
    """The same key for the same name: making one takes a while."""
    return _rsa_key(name, bits)


@cache
def _rsa_key(name: str, bits: int) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65_537, bits)


def ec_key(curve: str = "P-256") -> ec.EllipticCurvePrivateKey:
    return _ec_key(curve)


@cache
def _ec_key(curve: str) -> ec.EllipticCurvePrivateKey:
    curves = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}
    return ec.generate_private_key(curves[curve])


@cache
def ed_key() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def public_pem(key: Any) -> str:
    pem: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem.decode()


def private_pem(key: Any) -> str:
    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem.decode()


def jwk(key: Any, **more: Any) -> dict[str, Any]:
    """The public key as a key set lists it."""
    algorithms = {rsa.RSAPrivateKey: "RS256", ec.EllipticCurvePrivateKey: "ES256"}
    name = next((a for kind, a in algorithms.items() if isinstance(key, kind)), "EdDSA")
    found = json.loads(jwt.get_algorithm_by_name(name).to_jwk(key.public_key()))
    found.pop("key_ops", None)
    return {**found, **more}


def token(
    claims: dict[str, Any] | None = None,
    key: Any = SECRET,
    algorithm: str = "HS256",
    *,
    headers: dict[str, Any] | None = None,
    **more: Any,
) -> str:
    """A token signed as it should be; None as a claim leaves it out."""
    wanted = {**CLAIMS, **more} if claims is None else claims
    claims_left = {name: value for name, value in wanted.items() if value is not None}
    return forged({"alg": algorithm, "typ": "JWT", **(headers or {})}, claims_left, key, algorithm)


def forged(header: Any, payload: Any, key: Any = SECRET, algorithm: str = "HS256") -> str:
    """Any header and any payload, signed with this key as this algorithm does."""
    signed = f"{_part(header)}.{_part(payload)}"
    if isinstance(key, bytes):
        # The library refuses to sign with a public key as the secret; an attacker does not.
        signature = hmac.new(key, signed.encode(), hashlib.sha256).digest()
    else:
        method = jwt.get_algorithm_by_name(algorithm)
        signature = method.sign(signed.encode(), method.prepare_key(key))
    return f"{signed}.{_encoded(signature)}"


def unsigned(header: Any, payload: Any) -> str:
    return f"{_part(header)}.{_part(payload)}."


def _part(value: Any) -> str:
    return _encoded(value if isinstance(value, bytes) else json.dumps(value).encode())


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
