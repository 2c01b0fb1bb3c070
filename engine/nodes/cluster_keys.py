"""The keys of CurveZMQ, made of the secret that all nodes share.

Owns: a pair for the first node, and one for all others; a peer without the secret has neither public key.
Source: CurveZMQ, https://rfc.zeromq.org/spec/26/.
"""

import hashlib
import hmac
from typing import NamedTuple

import zmq
from zmq.utils import z85


class KeyPair(NamedTuple):
    """A pair in the form that ZeroMQ takes, Z85."""

    public: bytes
    secret: bytes


def leader_keys(shared: str) -> KeyPair:
    return _pair(shared, "leader")


def node_keys(shared: str) -> KeyPair:
    return _pair(shared, "node")


def _pair(shared: str, role: str) -> KeyPair:
    numbers = hmac.digest(shared.encode(), f"tokenyard {role}".encode(), hashlib.sha256)
    secret = z85.encode(numbers)
    return KeyPair(zmq.curve_public(secret), secret)
