"""`tokenyard keys`: make an entry for the file of --api-keys-file.

Owns: random keys, each shown once; the entry has only its hash.
Never: writes the file: the shell does.
"""

import secrets
import sys
from collections.abc import Sequence

from engine.options.api_keys import digest_of, is_name
from engine.options.options import OptionError

_USAGE = """\
usage: tokenyard keys new NAME     draw a key: it goes to stderr, its entry to stdout (>> keys.yaml)
       tokenyard keys hash NAME    the same for a key of yours, read from stdin
"""
_KEY_BYTES = 32
_MIN_KEY_CHARS = 20
"""The hash is a fast one: a key that could be guessed could be guessed from it."""


def main(words: Sequence[str]) -> int:
    if list(words) in (["-h"], ["--help"]):
        print(_USAGE, end="")
        return 0
    if len(words) != 2 or words[0] not in ("new", "hash"):
        asked = " ".join(["tokenyard keys", *words[:2]])
        raise OptionError(asked, "it takes `new NAME` or `hash NAME`", "see `tokenyard keys --help`")
    command, name = words
    if not is_name(name):
        fix = "use letters, digits, . _ and -, 64 at most, and not key-1"
        raise OptionError(f"the name {name[:80]!r}", "a key cannot be called so", fix)
    if command == "new":
        key = f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"
        print(f"the key of {name}, shown this once: {key}", file=sys.stderr)
    else:
        key = sys.stdin.readline().strip()
        if len(key) < _MIN_KEY_CHARS:
            what, fix = "the key on stdin", f"give {_MIN_KEY_CHARS} or more, drawn by a program"
            raise OptionError(what, f"it has {len(key)} characters, and could be guessed", fix)
    print(f'- name: {name}\n  sha256: "{digest_of(key.encode()).hex()}"')
    return 0
