"""The file of keys: what it may say, and how a mistake in it is told."""

import hashlib
import os

import pytest

from engine.options.api_keys import MAX_KEYS, ApiKey, KeysFile, given_keys
from engine.options.options import OptionError

HASH = hashlib.sha256(b"secret of team a").hexdigest()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys.yaml"

    def write(text: str, mode: int = 0o640) -> KeysFile:
        path.write_text(text)
        path.chmod(mode)
        return KeysFile(str(path))

    return write


def test_an_entry_says_who_it_is_and_what_it_may_do(file) -> None:
    (key,) = file(
        f'- {{name: team-a, sha256: "{HASH}", max_concurrent_requests: 8, most_urgent_priority: 0,'
        " max_queued_tokens: 65536, prefix_cache: shared, may_administer: true}"
    ).read()
    assert key == ApiKey(
        name="team-a",
        digest=bytes.fromhex(HASH),
        max_concurrent_requests=8,
        max_queued_tokens=65536,
        most_urgent_priority=0,
        cache_salt="",
        may_administer=True,
    )


def test_what_an_entry_leaves_out_is_the_careful_choice(file) -> None:
    (key,) = file(f'- name: a\n  sha256: "{HASH}"\n').read()
    assert not key.may_administer
    assert (key.max_concurrent_requests, key.max_queued_tokens, key.most_urgent_priority) == (None,) * 3
    assert key.cache_salt
    assert HASH not in key.cache_salt  # who reads salts, in a trace say, learns no hash


def test_json_lines_of_a_list_are_yaml_too(file) -> None:
    assert file(f'[{{"name": "a", "sha256": "{HASH}"}}]').read()[0].name == "a"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no key"),
        ("- name: a\n", "missing required field `sha256`"),
        (f'- name: ""\n  sha256: "{HASH}"\n', "name"),
        (f'- name: a\n  sha256: "{HASH[:-1]}"\n', "sha256"),
        (f'- name: a\n  sha256: "{HASH}"\n  max_conurrent_requests: 1\n', "max_conurrent_requests"),
        (f'- name: a\n  sha256: "{HASH}"\n  max_concurrent_requests: 0\n', "max_concurrent_requests"),
        (f'- name: a\n  sha256: "{HASH}"\n  max_queued_tokens: 0\n', "max_queued_tokens"),
        (f'- name: a\n  sha256: "{HASH}"\n  prefix_cache: mine\n', "prefix_cache"),
        (f'- name: key-1\n  sha256: "{HASH}"\n', "another name"),
        (f'- name: a\n  sha256: "{HASH}"\n- name: b\n  sha256: "{HASH}"\n', "b has a name or hash"),
        ("name: a\n", "array"),
        ("- [", "not valid YAML"),
        ("x" * (2**20 + 1), "larger than 1 MiB"),
    ],
)
def test_a_mistake_is_told_in_one_line_that_says_what_is_right(file, text, words) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        file(text).read()
    assert "\n" not in str(caught.value)
    assert HASH[:-1] not in str(caught.value)


def test_too_many_keys_are_refused(file) -> None:
    lines = [f'- {{name: a{i}, sha256: "{i:064x}"}}' for i in range(MAX_KEYS + 1)]
    with pytest.raises(OptionError, match=str(MAX_KEYS)):
        file("\n".join(lines)).read()


def test_a_file_that_everybody_can_write_is_refused_and_one_that_everybody_can_read_is_known(file) -> None:
    with pytest.raises(OptionError, match="chmod o-w"):
        file(f'- name: a\n  sha256: "{HASH}"\n', 0o646).read()
    assert file(f'- name: a\n  sha256: "{HASH}"\n', 0o644).can_be_read_by_others()
    assert not file(f'- name: a\n  sha256: "{HASH}"\n', 0o640).can_be_read_by_others()


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_a_file_that_cannot_be_read_is_named(file) -> None:
    with pytest.raises(OptionError, match="permission denied"):
        file("- name: a\n", 0o000).read()


def test_a_file_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(OptionError, match="no such file"):
        KeysFile(str(tmp_path / "absent")).read()


def test_keys_of_the_command_line_are_numbered_and_may_do_everything() -> None:
    first, second = given_keys(["a", "b"])
    assert (first.name, second.name) == ("key-1", "key-2")
    assert first.may_administer
    assert (first.cache_salt, first.max_concurrent_requests) == ("", None)
