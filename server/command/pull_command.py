"""`tokenyard pull ORG/NAME`: a model fetched from a hub, for `tokenyard serve ORG/NAME`.

Codes: 0 it is there, 1 it was not fetched, 2 a mistake on the command line, 69 no hub answers, 130 it was
interrupted.
"""

import argparse
import sys
from collections.abc import Sequence

from engine.options.values import show_bytes
from engine.pulling import NoHub, PullFailed, plan_pull, pull
from server.command.command_line import failed
from server.command.terminal.client import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NO_SERVER, Parser


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises OptionError."""
    options = build_parser().parse_args(list(words))
    try:
        return _pull(options)
    except PullFailed as error:
        return failed("tokenyard pull", error, EXIT_NO_SERVER if isinstance(error, NoHub) else EXIT_FAILED)
    except BrokenPipeError:
        raise
    except OSError as error:  # of the cache
        fix = "make room there, or let HF_HOME name another folder"
        return failed("tokenyard pull", PullFailed(str(error), fix), EXIT_FAILED)
    except KeyboardInterrupt:
        print("\ntokenyard pull: interrupted; the same command goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED


def build_parser() -> Parser:
    parser = Parser(
        prog="tokenyard pull",
        usage="tokenyard pull ORG/NAME [options]",
        description="Fetch a model from a hub into the hub's own cache: configuration, tokenizer and "
        "safetensors, compared with the checksums that the hub publishes. Run it again to go on after an "
        "interruption.",
        epilog="HF_ENDPOINT names a mirror, HF_HOME the folder of the cache, HF_TOKEN a token for models "
        "that are not public. No other command fetches a model.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="ORG/NAME", help="the model's name on the hub")
    parser.add_argument(
        "--revision", default="main", help="branch, tag or commit; `serve` finds main by name (default: main)"
    )
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATTERN",
        help="weights to fetch instead of all safetensors, such as '*Q4_K_M.gguf'; may be repeated",
    )
    return parser


def _pull(options: argparse.Namespace) -> int:
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not sys.stderr.isatty():
        disable_progress_bars()
    plan = plan_pull(options.name, revision=options.revision, include=options.include)
    size = show_bytes(plan.num_bytes)
    print(f"{plan.name} at {plan.host}: {len(plan.files)} files, {size}", file=sys.stderr)
    pulled = pull(plan, revision=options.revision)
    print(f"{len(plan.files)} files, {size}, in {pulled.folder}")
    gguf = [file for file in plan.files if file.endswith(".gguf")]
    model = pulled.folder / gguf[0] if gguf else plan.name if options.revision == "main" else pulled.folder
    print(f"\n  Next: tokenyard serve {model}\n")
    if not gguf:
        print(f"  To have its files compared at every start, add --checksums {pulled.checksums}")
    return 0
