"""Help, the manual page and completion: short by default, whole on request, made of the declarations."""

import contextlib
import shutil
import subprocess
from collections.abc import Callable

import pytest

from engine.options.options import BY_KEY, COMMON, DECLARATIONS, Group
from server.command.cli import main


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def read(*words: str) -> str:
        with contextlib.suppress(SystemExit):
            assert main(words) == 0
        return capsys.readouterr().out

    return read


def flags_in(text: str) -> set[str]:
    """Options whose own line begins with their flag."""
    words = [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  --")]
    return {word.removeprefix("--") for word in words} - {"config", "json"}


def test_help_is_the_dozen_that_most_need_and_says_how_to_see_more(said) -> None:
    text = said("serve", "--help")
    assert flags_in(text) == {name.replace("_", "-") for name in COMMON}
    assert len(COMMON) <= 13
    assert "--help=all" in text
    assert "kv-cache, scheduler" in text


def test_all_a_group_or_a_word_are_shown_on_request(said) -> None:
    assert flags_in(said("serve", "--help=all")) == set(BY_KEY)
    keys = said("serve", "--help=keys")
    assert flags_in(keys) == {key for key, name in BY_KEY.items() if DECLARATIONS[name].group is Group.KEYS}
    assert {"responses-store-memory", "watermark"} <= flags_in(said("serve", "--help=kept"))
    assert flags_in(said("doctor", "--help=tls-k")) == {"tls-key"}


def test_a_word_that_no_option_has_is_answered_with_the_groups(capsys) -> None:
    assert main(["serve", "--help=zebra"]) == 2
    assert "kv-cache" in capsys.readouterr().err


def test_every_group_has_options_and_a_word_of_its_own(said) -> None:
    text = said("serve", "--help")
    words = text[text.index("one group:") :].splitlines()[1].split(";")[0].split(", ")
    assert len(set(words)) == len(Group)
    for word in words:
        assert 0 < len(flags_in(said("serve", f"--help={word}"))) < len(BY_KEY)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_of_a_shell_knows_commands_options_and_words(said, shell, tmp_path) -> None:
    pytest.importorskip("shtab")
    script = said("completion", shell)
    for word in ("run-batch", "--scheduling-policy", "priority", "--changed"):
        assert word in script
    if shutil.which(shell):
        path = tmp_path / "script"
        path.write_text(script)
        subprocess.run([shell, "-n", str(path)], check=True)


def test_bash_completes_the_words_of_an_option(said, tmp_path) -> None:
    pytest.importorskip("shtab")
    (tmp_path / "script").write_text(said("completion", "bash"))
    asked = (
        f". {tmp_path}/script; COMP_WORDS=(tokenyard serve --fairness ''); COMP_CWORD=3; "
        "_shtab_tokenyard 2>/dev/null; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["none", "tenant"]


def test_a_shell_that_is_not_known_is_a_mistake(capsys) -> None:
    assert main(["completion", "dos"]) == 2
    assert "bash, zsh" in capsys.readouterr().err


def test_the_manual_page_has_every_option_once(said) -> None:
    page = said("man")
    for key in BY_KEY:
        flag = f"--{key} ".replace("-", "\\-")
        assert page.count(f'.BI "{flag}"') == 1, key
    assert not [line for line in page.splitlines() if line.startswith("'")]
