"""Certificates for the tests of TLS, made by the openssl program."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")


@dataclass(frozen=True)
class Pair:
    cert: Path
    key: Path


def self_signed(folder: Path, name: str) -> Pair:
    """For 127.0.0.1; it is its own authority."""
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    _openssl(
        *(
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ),
        *("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", str(pair.key), "-out", str(pair.cert)),
    )
    return pair


def encrypted(pair: Pair) -> Pair:
    """The same, with a key that needs a password."""
    key = pair.key.with_suffix(".locked")
    _openssl("ec", "-in", str(pair.key), "-out", str(key), "-aes128", "-passout", "pass:secret")
    return Pair(pair.cert, key)


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=30)
