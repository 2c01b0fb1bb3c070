"""`tokenyard doctor`: would `tokenyard serve` with these options work here, and the remedy if not.

Owns: the command, the two checks that are the edge's own (port, connections), and the layout of the report.
Never: loads the model or keeps the port.

Codes: 0 it would, perhaps with warnings; 1 it would not; 2 a mistake on the command line.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from engine.diagnosis import Finding, Verdict, diagnose
from engine.options.edge_config import ADMIN_HOST
from engine.options.options import Options
from engine.options.sources import read_options
from server.command.command_line import MORE_MODELS, OptionParser, Several
from server.edge.http.listening import CannotListen, PortInUse, listen, listen_unix, num_connections_allowed
from server.edge.sockets.places import MAX_CONNECTIONS

EXIT_FAULT = 1

_MARKS = {Verdict.OK: "ok", Verdict.WARNING: "warning", Verdict.FAULT: "FAULT", Verdict.UNKNOWN: "-"}
_MARK_WIDTH, _TOPIC_WIDTH = 9, 16


def main(words: Sequence[str]) -> int:
    """Entry point; returns the exit code. Raises OptionError for words that are not understood."""
    parser = OptionParser(
        prog="tokenyard doctor",
        description="Check this machine and the model, or several, before serving.",
        takes_several=Several.TAKEN,
    )
    parser.add_argument("--json", action="store_true", help="Print JSON, once all is known.")
    flags = parser.read(words)
    as_json, more = flags.pop("json"), flags.pop(MORE_MODELS, ())
    options = read_options(flags, os.environ)
    findings = []
    for finding in _examine(options, more):
        findings.append(finding)
        if not as_json:
            print(_line(finding), flush=True)
    is_fault = any(finding.verdict is Verdict.FAULT for finding in findings)
    if not as_json:
        print(f"\n{_verdict(findings)}")
    else:
        json.dump({"ok": not is_fault, "findings": [asdict(each) for each in findings]}, sys.stdout, indent=2)
        print()
    return EXIT_FAULT if is_fault else 0


def _verdict(findings: Sequence[Finding]) -> str:
    """Sum up, in a line: what to do next."""
    faults, warnings = (
        [finding.topic for finding in findings if finding.verdict is verdict]
        for verdict in (Verdict.FAULT, Verdict.WARNING)
    )
    if faults:
        return f"It would not start: see {', '.join(faults)}."
    if warnings:
        return f"It will start, with {', '.join(warnings)} as it says above: tokenyard serve"
    return "All is well; next: tokenyard serve"


def _examine(options: Options, more: Sequence[str]) -> Iterator[Finding]:
    yield _port("--port", options.host, options.port) if options.uds is None else _socket(options.uds)
    if options.health_port is not None:
        yield _port("--health-port", options.host, options.health_port)
    if options.admin_port is not None:
        yield _port("--admin-port", ADMIN_HOST, options.admin_port)
    yield _connections()
    yield from diagnose(options, more)


def _port(flag: str, host: str, port: int) -> Finding:
    topic = flag.removeprefix("--").replace("-", " ")
    try:
        listen(host, port, flag=flag).close()
    except (PortInUse, CannotListen) as error:
        what, _, fix = str(error).partition("; ")
        return Finding(topic=topic, verdict=Verdict.FAULT, what=what, fix=fix)
    return Finding(topic=topic, verdict=Verdict.OK, what=f"{host}:{port} is free")


def _socket(path: str) -> Finding:
    try:
        with listen_unix(str(Path(path).expanduser().absolute())):
            return Finding(topic="uds", verdict=Verdict.OK, what=f"{path} is free")
    except (PortInUse, CannotListen) as error:
        what, _, fix = str(error).partition("; ")
        return Finding(topic="uds", verdict=Verdict.FAULT, what=what, fix=fix)


def _connections() -> Finding:
    """Count the connections, after `listen`, which raises the soft limit of open files as far as it may."""
    num = num_connections_allowed()
    what = f"{num} at once, as open files allow"
    if num >= MAX_CONNECTIONS:
        return Finding(topic="connections", verdict=Verdict.OK, what=what)
    return Finding(
        topic="connections",
        verdict=Verdict.WARNING,
        what=f"{what}; {MAX_CONNECTIONS} would be possible",
        fix="raise the hard limit of open files: `ulimit -Hn 8192`, or LimitNOFILE= of its unit",
    )


def _line(finding: Finding) -> str:
    mark = f"{_MARKS[finding.verdict]:<{_MARK_WIDTH}}{finding.topic:<{_TOPIC_WIDTH}}"
    text = f"{mark}{finding.what}"
    return f"{text}\n{'':<{_MARK_WIDTH + _TOPIC_WIDTH}}-> {finding.fix}" if finding.fix else text
