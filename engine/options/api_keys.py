"""API keys, given directly or listed in a file by their hashes."""

import hashlib
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from engine.options.declaration import OptionError

MAX_KEYS = 1024
"""Limit, since each request's key is compared with all: more would take over a millisecond."""
_MAX_FILE_BYTES = 2**20
_PRIVATE_SALT = re.compile(r"[0-9a-f]{64}/")
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_MODEL = r"^[^*]*\*?[^*]*$"
"""A name with one `*` at most, for any text."""
_RESERVED_NAME = re.compile(r"key-\d+")
"""Names of the keys of --api-key."""
_SPELLED = "A list of `- name: team-a` with `sha256: ...`; `tokenyard keys new team-a` writes an entry"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    name: str
    """The tenant of its requests, for fairness and for stored responses."""
    digest: bytes
    """SHA-256 of the key."""
    max_concurrent_requests: int | None = None
    max_queued_tokens: int | None = None
    """Limit on the waiting prompt tokens of its requests; None: only the queue's own limit."""
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    """Limit on the tokens of prompts and outputs; None: none."""
    most_urgent_priority: int | None = None
    """Lowest priority value that its requests may ask for; None: any."""
    cache_salt: str = ""
    """Salt of the prefix cache, shared only among requests of the same salt; empty: none."""
    may_administer: bool = True
    models: tuple[str, ...] | None = None
    """Names of models and adapters that its requests may use, some with a `*`; None: all."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key as written in the file."""

    name: Annotated[str, msgspec.Meta(pattern=_NAME)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    max_concurrent_requests: Annotated[int, msgspec.Meta(ge=1, le=2**16)] | None = None
    max_queued_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)] | None = None
    max_requests_per_minute: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    max_tokens_per_minute: Annotated[int, msgspec.Meta(ge=1, le=2**40)] | None = None
    most_urgent_priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    prefix_cache: Literal["private", "shared"] = "private"
    may_administer: bool = False
    models: (
        Annotated[tuple[Annotated[str, msgspec.Meta(pattern=_MODEL)], ...], msgspec.Meta(min_length=1)] | None
    ) = None


class KeysFile:
    """The file of --api-keys-file. Methods may be called again after it has changed."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def read(self) -> tuple[ApiKey, ...]:
        """Read all keys. Raises OptionError, which names the first wrong entry and quotes no hash."""
        # Not at the top: most starts have no file, and --help must not wait for a YAML parser.
        import yaml

        try:
            if self.path.stat().st_size > _MAX_FILE_BYTES:
                raise self._wrong("it is larger than 1 MiB", "name the right file")
            content = yaml.safe_load(self.path.read_text(encoding="utf-8"))
            self._check_that_others_cannot_write()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8"
            raise self._wrong(why.lower(), "name a readable YAML file") from error
        except yaml.YAMLError as error:
            place = getattr(error, "problem_mark", None)
            line = f" (line {place.line + 1})" if place else ""
            raise self._wrong(f"not valid YAML{line}", "correct it") from error
        return self._keys(content)

    def can_be_read_by_others(self) -> bool:
        return bool(self.path.stat().st_mode & stat.S_IROTH)

    def _check_that_others_cannot_write(self) -> None:
        if self.path.stat().st_mode & stat.S_IWOTH:
            raise self._wrong(
                "every user of this machine can write it, and so add keys", f"chmod o-w {self.path}"
            )

    def _keys(self, content: object) -> tuple[ApiKey, ...]:
        try:
            entries = msgspec.convert(content if content is not None else [], list[_Entry])
        except msgspec.ValidationError as error:
            raise self._wrong(str(error), _SPELLED) from error
        if not entries:
            raise self._wrong("there is no key in it", _SPELLED)
        if len(entries) > MAX_KEYS:
            raise self._wrong(f"it has {len(entries)} keys", f"{MAX_KEYS} are the most")
        for entry in entries:
            if _RESERVED_NAME.fullmatch(entry.name):
                raise self._wrong(f"{entry.name} is what a key of --api-key is called", "choose another name")
        for values in ([entry.name for entry in entries], [entry.sha256 for entry in entries]):
            twice = next((place for place, value in enumerate(values) if value in values[:place]), None)
            if twice is not None:
                raise self._wrong(f"{entries[twice].name} has a name or hash that is there before", "drop it")
        return tuple(_key_of(entry) for entry in entries)

    def _wrong(self, why: str, fix: str) -> OptionError:
        return OptionError(f"--api-keys-file {self.path}", why, fix)


def is_name(text: str) -> bool:
    return re.match(_NAME, text) is not None and not _RESERVED_NAME.fullmatch(text)


def given_keys(keys: Iterable[str]) -> tuple[ApiKey, ...]:
    """Make the keys of --api-key, named `key-1` and so on, with all rights."""
    return tuple(
        ApiKey(name=f"key-{number}", digest=digest_of(key.encode())) for number, key in enumerate(keys, 1)
    )


def digest_of(key: bytes) -> bytes:
    """Hash a key, so that all have the same length and comparing them reveals none of it."""
    return hashlib.sha256(key).digest()


def is_private(cache_salt: str) -> bool:
    """Whether a request's cache salt is that of a private key, or has its form: a secret, in either case."""
    return _PRIVATE_SALT.match(cache_salt) is not None


def _key_of(entry: _Entry) -> ApiKey:
    digest = bytes.fromhex(entry.sha256)
    # A salt that another client could name in its own requests would open the cache to it.
    salt = hashlib.sha256(b"prefix cache" + digest).hexdigest() if entry.prefix_cache == "private" else ""
    fields = msgspec.structs.asdict(entry)
    del fields["sha256"], fields["prefix_cache"]
    return ApiKey(digest=digest, cache_salt=salt, **fields)
