"""The words after `serve`, `doctor` or `config show`: the options of the server, as text by name.

Owns: the parser that these commands share, and the advice about an unknown flag, also about one that vLLM,
llama.cpp or TGI has: it is not accepted, since it may mean something different there, but for switches that
change nothing here: they are passed over, with a line that says so.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NoReturn

from engine.options.options import COMMON, DECLARATIONS, Group, OptionError
from engine.options.sources import add_flags, closest
from engine.options.values import Switch, ValueKind

_HELP = "--help"
_ADAPTERS, _NAMES = "--lora-modules", "--served-model-name"
_EPILOG = """\
Each option is also an environment variable (--max-num-seqs: TOKENYARD_MAX_NUM_SEQS) and a key of the
--config file (max-num-seqs). Flags win over the environment, that over the file.
Numbers: 2K is 2048, 2k is 2000; 4GiB and 4G are 4 * 2**30 bytes, 4GB is 4 * 10**9.
"""
_OURS = {
    **{
        "tp": "tensor-parallel-size",
        "tensor-parallel": "tensor-parallel-size",
        "num-shard": "tensor-parallel-size",
        "dp": "data-parallel-size",
        "data-parallel": "data-parallel-size",
        "master-port": "cluster-port",
        "distributed-executor-backend": "distributed-executor",
    },
    **{"c": "max-model-len", "ctx-size": "max-model-len", "max-total-tokens": "max-model-len"},
    **{"model-id": "model", "m": "model", "tokenizer": "model", "a": "served-model-name"},
    **{"np": "max-num-seqs", "parallel": "max-num-seqs", "max-concurrent-requests": "max-queued-requests"},
    **{"max-batch-total-tokens": "max-num-batched-tokens", "ubatch-size": "max-num-batched-tokens"},
    **{"threads": "num-threads", "t": "num-threads", "threads-http": "num-threads"},
    **{"cuda-memory-fraction": "gpu-memory-utilization", "mem-fraction-static": "gpu-memory-utilization"},
    **{"num-gpu-blocks": "num-gpu-blocks-override", "kv-cache-memory-bytes": "kv-cache-memory"},
    **{"kv-offloading-size": "swap-space"},
    **{"kv-events-config": "kv-events-port"},
    **{"ssl-keyfile": "tls-key", "ssl-certfile": "tls-cert", "ssl-ca-certs": "tls-client-ca"},
    **{"ssl-key-file": "tls-key", "ssl-cert-file": "tls-cert", "allowed-origins": "cors-origin"},
    **{"cors-allow-origin": "cors-origin", "uvicorn-log-level": "log-level", "timeout": "request-timeout"},
    **{"chat-template-file": "chat-template", "rope-scaling": "hf-overrides", "api-prefix": "root-path"},
    **{"schedule-policy": "scheduling-policy"},
}
_NOT_NEEDED = {
    **dict.fromkeys(("revision", "download-dir", "load-format"), "`tokenyard pull` fetches models"),
    **dict.fromkeys(("hostname",), "use --host"),
    "cpu-offload-gb": "weights lie on the device as a whole: --quantization makes them smaller",
    "max-logprobs": "a request may ask for 20 at each token, and no more",
    "max-log-len": "texts of requests are never logged",
    "generation-config": "the checkpoint's file is read: --override-generation-config wins over it",
    "disable-fastapi-docs": "--page off takes /docs away; /openapi.json is always there",
    "enable-force-include-usage": "a stream has its usage where stream_options asks for it",
    "seed": "a request names its seed; without one, each reply is another",
    **dict.fromkeys(("runner", "convert"), "use --task"),
    "hf-token": "nothing is fetched by a server: `tokenyard pull` reads HF_TOKEN",
    **dict.fromkeys(
        ("mamba-ssm-cache-dtype", "mamba-cache-dtype"),
        "states of recurrent layers are float32: they are rounded at each token, and fewer bits drift",
    ),
    **dict.fromkeys(
        ("ngl", "n-gpu-layers", "gpu-layers"), "a model lies on one kind of device: use --device"
    ),
}

_PASSED_OVER = {
    **dict.fromkeys(("trust-remote-code",), "code of a checkpoint is never run"),
    **dict.fromkeys(
        ("disable-log-requests", "no-enable-log-requests", "enable-log-requests"),
        "each request has a line in the log, without its text",
    ),
    "enable-prompt-tokens-details": "usage always has them",
    "enable-request-id-headers": "each reply has x-request-id",
    "disable-uvicorn-access-log": "there is no such log",
    **dict.fromkeys(("O0", "O1", "O2", "O3"), "kernels are chosen at the start"),
    "enable-expert-parallel": "experts are divided as --tensor-parallel-size says",
    **dict.fromkeys(("disable-log-stats",), "there are no statistics in the log: /metrics has them"),
    **dict.fromkeys(("enable-auto-tool-choice", "jinja"), "tools are on unless --tool-call-parser is none"),
    **dict.fromkeys(("enable-lora",), "--lora-modules and --lora-directory turn adapters on"),
    **dict.fromkeys(("enable-chunked-prefill",), "long prompts are always computed in parts"),
    **dict.fromkeys(("async-scheduling",), "steps are planned ahead wherever that is possible"),
    **dict.fromkeys(("enable-server-load-tracking",), "/load always answers"),
    **dict.fromkeys(
        ("use-v2-block-manager", "disable-custom-all-reduce", "disable-frontend-multiprocessing"),
        "there is no such part here",
    ),
}
"""Switches of other servers without which a start here is the same, and why."""

_WITH_VALUE = {
    "compilation-config": "kernels are chosen at the start",
    "max-seq-len-to-capture": "CUDA graphs are of steps, whatever the length of a sequence",
    **dict.fromkeys(
        ("structured-outputs-config", "guided-decoding-backend"), "grammars have one backend, llguidance"
    ),
    "chat-template-content-format": "the template itself shows whether it takes parts or a text",
    "num-scheduler-steps": "steps are planned ahead wherever that is possible",
}
"""The same of flags with a value."""

MORE_MODELS = "more_models"


class Several(Enum):
    """The treatment of a second MODEL on the command line."""

    REFUSED = "refused"
    TAKEN = "taken"


class OptionParser(argparse.ArgumentParser):
    """A parser of all options of the server. A mistake raises OptionError rather than ending the process."""

    def __init__(self, *, prog: str, description: str, takes_several: Several = Several.REFUSED) -> None:
        self._takes_several = takes_several is Several.TAKEN
        super().__init__(
            prog=prog,
            usage=f"{prog} [MODEL ...] [options]" if self._takes_several else f"{prog} [MODEL] [options]",
            description=description,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # an abbreviation breaks the day a second option begins alike
            add_help=False,
        )
        self.add_argument(
            "-h",
            _HELP,
            action="store_true",
            default=argparse.SUPPRESS,
            help="Show the options that most need; --help=all shows all, --help=GROUP those of a group, "
            "--help=WORD those whose text has the word.",
        )
        self._flags = add_flags(self)

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Parse to values by name, as option_sources.read_options takes them. Raises OptionError.

        Where several models may be named, `more_models` are those behind the first.
        Print help and raise SystemExit if the words ask for it.
        """
        self._answer_help(words)
        found, unknown = self.parse_known_args(_repeated(self._without_needless(words)))
        are_models = self._takes_several and not any(word.startswith("-") for word in unknown)
        if unknown and not are_models:
            raise self._unknown_word(unknown)
        return {**vars(found), **({MORE_MODELS: tuple(unknown)} if unknown else {})}

    def _without_needless(self, words: Sequence[str]) -> list[str]:
        """Leave out switches that change nothing here, with a line about each; write names with hyphens."""
        needed: list[str] = []
        passed = ""
        for word in words:
            # True and false are vLLM's older form of a switch.
            is_value = passed in _WITH_VALUE or (passed and word.lower() in ("true", "false"))
            if is_value and not word.startswith("-"):
                passed = ""
                continue
            flag, _, value = word.replace("_", "-").partition("=")
            name = flag.lstrip("-") if flag.startswith(("--", "-O")) else ""
            why = _WITH_VALUE.get(name) or (None if value else _PASSED_OVER.get(name))
            passed = name if why and not value else ""
            if why is None:  # vLLM takes either sign between the words of a name
                needed.append(flag + word[len(flag) :] if word.startswith("--") else word)
            else:
                print(f"{self.prog}: {flag} is passed over: {why}", file=sys.stderr)
        return needed

    def _answer_help(self, words: Sequence[str]) -> None:
        asked = [word for word in words if word in ("-h", _HELP) or word.startswith(f"{_HELP}=")]
        if not asked:
            return
        topic = asked[0].partition("=")[2]
        chosen = _names_about(topic)
        for name, action in self._flags.items():
            if name not in chosen:
                action.help = argparse.SUPPRESS
        if not topic:
            groups = ", ".join(_slug(group) for group in Group)
            self.epilog = f"{len(chosen)} of {len(self._flags)} options; {_HELP}=all shows all of them, "
            self.epilog += f"{_HELP}=GROUP one group:\n{groups}; {_HELP}=WORD finds a word.\n\n{_EPILOG}"
        print(self.format_help(), end="")
        raise SystemExit(0)

    def error(self, message: str) -> NoReturn:
        raise OptionError(self.prog, message, f"see `{self.prog} --help`")

    def _unknown_word(self, words: list[str]) -> OptionError:
        """About the first unknown flag; a value is not repeated, since it may be a secret."""
        word = next((word for word in words if word.startswith("-")), "").split("=", maxsplit=1)[0]
        if not word:
            return OptionError(
                self.prog, "there is more than one MODEL", "give one, and quote values that hold spaces"
            )
        keys = {name: name.replace("_", "-") for name in DECLARATIONS}
        switches = [name for name in keys if isinstance(DECLARATIONS[name].kind, Switch)]
        known = [f"--{key}" for key in keys.values()]
        known += [*(f"--no-{keys[name]}" for name in switches), "--config"]
        flag = word.replace("_", "-")
        advice = advice_for(flag.lstrip("-"), frozenset(keys.values())) or closest(flag, known)
        return OptionError(word, "there is no such option", advice)


def _repeated(words: Sequence[str]) -> list[str]:
    """Repeat an option before each of several adapters or names, as vLLM's command line has them.

    Names only where a MODEL comes first, since a word behind `--served-model-name NAME` may be the MODEL.
    """
    spread: list[str] = []
    names_follow = bool(words) and not words[0].startswith("-")
    flag = ""
    for word in words:
        is_adapter = flag == _ADAPTERS and ("=" in word or word.startswith("{"))
        is_value = not word.startswith("-") and (is_adapter or (flag == _NAMES and names_follow))
        if is_value and spread[-1] != flag:
            spread.append(flag)
        if not is_value:
            flag = word
        spread.append(word)
    return spread


def valued(kind: ValueKind) -> Callable[[str], Any]:
    """Make what argparse takes as the type of a flag's value."""

    def parse(text: str) -> object:
        try:
            return kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"it must {error}") from None

    return parse


def failed(command: str, error: Exception, code: int) -> int:
    """Print the error as one line; return the exit code. Its text may hold commands for a terminal."""
    line = " ".join(str(error).split())
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
    print(f"{command}: {shown}", file=sys.stderr)
    return code


def _slug(group: Group) -> str:
    """Shorten a heading to a word for --help=GROUP: `Keys and TLS` is keys."""
    return group.value.partition(",")[0].partition(" and ")[0].lower().replace(" ", "-")


def _names_about(topic: str) -> frozenset[str]:
    """Choose options by `all`, a group, or a word in their names and texts. Raises OptionError."""
    if not topic:
        return frozenset(COMMON)
    if topic == "all":
        return frozenset(DECLARATIONS)
    word = topic.lower().strip("-")
    groups = [group for group in Group if word in (_slug(group), *_slug(group).split("-"))]
    if groups:
        return frozenset(name for name, each in DECLARATIONS.items() if each.group in groups)
    spaced = word.replace("-", "_")
    found = [name for name, each in DECLARATIONS.items() if spaced in name or word in each.help.lower()]
    if not found:
        known = ", ".join(_slug(group) for group in Group)
        raise OptionError(f"{_HELP}={topic}", "no option has this word", f"use all, or a group: {known}")
    return frozenset(found)


def advice_for(flag: str, known: frozenset[str]) -> str:
    """Advise on a flag without its dashes; empty if no other server that we know has it."""
    ours = _OURS.get(flag)
    if ours in known:
        return f"here it is --{ours}: `tokenyard serve --help` says what it counts"
    why = (_NOT_NEEDED | _PASSED_OVER | _WITH_VALUE).get(flag)
    return f"it is not needed here: {why}" if why else ""
