"""Options of `tokenyard simulate`, and their defaults.

Owns: the words of the command line, and what they stand for if they are not given.
Never: runs anything (command.py).
"""

import argparse
from dataclasses import MISSING, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench.simulate.find import Sought
from bench.simulate.fitting.machines import MACHINES
from bench.simulate.replica import Stepping
from bench.simulate.requests.arrivals import LengthDistribution
from bench.simulate.router import RouterKind
from bench.simulate.setup import (
    bounds,
    count,
    draft_rates,
    length,
    number,
    priority_mix,
    settable_fields,
    setting,
    share,
    tenant_mix,
)
from bench.words import WordParser
from scheduler.config import SchedulerConfig

# The sizes of a model of 8 billion parameters in bfloat16 on one H100, by arithmetic from its data sheet:
# 16 GB of weights and 128 KiB of KV a token at 3.35 TB/s, 16 GFLOP a token at half of 990 TFLOP/s.
STEP_TIME = {"base_ms": 5.0, "token_us": 33.0, "decode_us": 5.0, "context_ns": 40.0}
CONFIG = {
    "num_blocks": 24_000,
    "block_size": 16,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "max_model_len": 8192,
}
_FLAG_OF_FIELD = {"policy": "--scheduling-policy"}
SYNTHETIC: dict[str, Any] = {
    "num_requests": 10_000,
    "request_rate": 10.0,
    "burstiness": 1.0,
    "prompt_len": LengthDistribution.parse("lognormal:256:1:4096"),
    "output_len": LengthDistribution.parse("lognormal:128:0.7:2048"),
    "priority_mix": ((0, 1.0),),
    "tenant_mix": (("", 1.0),),
    "prefix_groups": 0,
    "prefix_len": 256,
}
_EPILOG = """\
Variants of --compare are words joined by +: a policy, or NAME=VALUE for any setting of the scheduler
(aging is short for priority_aging_s), load, replicas, roles, cells, router, stepping, draft_rates or
draft_pass_ms; base is what the other options say.
  tokenyard simulate --priority-mix 0:1,10:4 --request-rate 30 --compare fcfs,priority,priority+aging=2
  tokenyard simulate --draft-rates 0.8:0.7:0.6 --compare base,draft_pass_ms=1,draft_admission=all
  tokenyard simulate --requests yesterday.jsonl --fit steps.jsonl --compare base,load=1.5,num_blocks=48000
  tokenyard simulate --requests yesterday.jsonl --find replicas --slo-ttft-ms 2000 --slo-itl-ms 100
A request file holds JSON lines with arrival_s, prompt_len (or prompt) and max_tokens (or output_len), and
where wanted priority, tenant, prefix_group and prefix_len; or it is a public trace: Mooncake, Bailian (JSON
lines), Azure, BurstGPT (CSV).
"""


def build_parser() -> argparse.ArgumentParser:
    parser = WordParser(
        usage="tokenyard simulate [options]",
        prog="tokenyard simulate",
        description="Run the scheduler in virtual time: what happens if there is more load, more memory, "
        "another policy, another replica.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_requests(parser.add_argument_group("requests"))
    _add_step_time(parser.add_argument_group("step time", "base + token * tokens + decode * decodes + ..."))
    _add_overhead(parser.add_argument_group("overhead", "HTTP and tokenization: time outside of steps"))
    _add_setup(parser.add_argument_group("what serves them"))
    _add_roles(parser.add_argument_group("roles", "prefill and decode on replicas of their own"))
    _add_drafts(parser.add_argument_group("drafts", "speculative decoding; accepted drafts come in one step"))
    _add_config(parser.add_argument_group("the scheduler, as in `tokenyard serve`"))
    _add_report(parser.add_argument_group("report"))
    return parser


def _add_requests(group: Any) -> None:
    def add(name: str, kind: Any, text: str, metavar: str | None = None) -> None:
        default = SYNTHETIC[name]
        shown = default.text if kind is length else default
        if name.endswith("_mix"):
            shown = "all the same"
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar=metavar, help=f"{text} (default {shown})")

    group.add_argument(
        "--requests", type=Path, metavar="FILE", help="a file instead of drawn requests (below)"
    )
    add("num_requests", count(1), "how many are drawn", "N")
    add("request_rate", number(1e-9, most=float("inf")), "arrivals a second; inf is all at once", "PER_S")
    add("burstiness", number(1e-3), "1 is Poisson, below it bursts, above it more even", "SHAPE")
    lengths = "a number, uniform:LOW:HIGH, exponential:MEAN[:MAX], lognormal:MEDIAN:SIGMA[:MAX]"
    add("prompt_len", length, f"tokens: {lengths}", "LENGTH")
    add("output_len", length, "in the same way", "LENGTH")
    add("priority_mix", priority_mix, "priorities with their weights; lower is more urgent", "P:W,...")
    add("tenant_mix", tenant_mix, "tenants with their weights", "NAME:W,...")
    add("prefix_groups", count(0), "groups of prompts that begin alike; each prompt is of one of them", "N")
    add("prefix_len", count(1), "tokens with which the prompts of a group begin", "N")
    group.add_argument("--seed", type=count(0), default=0, metavar="N", help="default %(default)s")
    group.add_argument(
        "--save-requests", type=Path, metavar="FILE", help="write them as --requests reads them"
    )


def _add_step_time(group: Any) -> None:
    group.add_argument("--fit", type=Path, metavar="TRACE", help="find them in a file of --trace-steps")
    group.add_argument(
        "--machine",
        choices=MACHINES,
        metavar="NAME",
        help=f"those of a machine that was measured, and its KV blocks: {', '.join(MACHINES)}",
    )
    for name, text in (
        ("base_ms", "each step"),
        ("token_us", "and for each token in it"),
        ("decode_us", "and for each sequence that decodes"),
        ("context_ns", "and for each token of context that is read"),
    ):
        flag, unit = "--step-" + name.replace("_", "-"), name.rsplit("_")[-1].upper()
        group.add_argument(flag, type=number(0.0), metavar=unit, help=f"{text} (default {STEP_TIME[name]:g})")


def _add_overhead(group: Any) -> None:
    add = group.add_argument
    add("--request-ms", type=number(0.0), metavar="MS", help="each request (default 0)")
    add("--request-token-us", type=number(0.0), metavar="US", help="each token of its prompt (default 0)")
    add(
        "--measured",
        type=Path,
        metavar="FILE",
        help="a run of `tokenyard bench serve --json`: find the overhead in it, print how far off the "
        "simulation of it is, and simulate its requests if no others are given; the other options must "
        "describe its server",
    )
    add(
        "--measured-again",
        type=Path,
        metavar="FILE",
        help="another run of the same load: print with each error how far apart the two runs are",
    )


def _add_setup(group: Any) -> None:
    add = group.add_argument
    add("--load", type=number(1e-9), default=1.0, metavar="FACTOR", help="the same requests, faster by this")
    add("--replicas", type=count(1, 4096), default=1, metavar="N", help="default %(default)s")
    add(
        "--autoscale",
        type=bounds,
        metavar="LEAST:MOST",
        help="replicas come and go between these numbers, as the rule of overlays/autoscaled says",
    )
    add(
        "--start-s",
        type=number(0.0),
        metavar="S",
        help="from the decision to a replica's first request; its cache is empty (default 60)",
    )
    add(
        "--mean-life-s",
        type=number(1.0),
        metavar="S",
        help="mean time after which a replica fails; it is replaced, and its requests begin anew elsewhere",
    )
    add(
        "--cells",
        type=count(1, 4096),
        default=1,
        metavar="N",
        help="groups of replicas with a router each, to which requests go in turn; each runs in a process of "
        "its own, so that many replicas take less time (default %(default)s)",
    )
    add("--cell", type=count(0), metavar="N", help="simulate this cell alone and print its counts as JSON")
    add(
        "--stepping",
        type=setting(Stepping),
        default=Stepping.LEAP,
        metavar="NAME",
        help="leap over steps in which nothing is decided (default), or plan each; the result is the same",
    )
    add(
        "--router",
        type=setting(RouterKind),
        default=RouterKind.LEAST_WAITING,
        metavar="NAME",
        help="which replica takes a request: least-waiting (default), round-robin, prefix-aware, "
        "one-line (as --data-parallel-size does)",
    )


def _add_roles(group: Any) -> None:
    add = group.add_argument
    add("--roles", metavar="PREFILL:DECODE", help="replicas that compute prompts, and that generate: 2:6")
    add(
        "--transfer-gbit",
        type=number(1e-3),
        default=100.0,
        metavar="GBIT_S",
        help="rate at which a replica sends, and at which one receives, keys and values (default 100)",
    )
    add("--transfer-ms", type=number(0.0), default=1.0, metavar="MS", help="delay of each (default 1)")
    add(
        "--kv-token-bytes",
        type=count(1),
        metavar="BYTES",
        help="of a token's keys and values (default that of --machine, else 131072)",
    )


def _add_drafts(group: Any) -> None:
    add = group.add_argument
    add(
        "--draft-rates",
        type=draft_rates,
        default=(),
        metavar="R:R:...",
        help="how often a draft is right at its place, if those before it are; as many drafts as rates",
    )
    add(
        "--draft-pass-ms",
        type=number(0.0),
        default=0.0,
        metavar="MS",
        help="what a draft model takes for one more draft of all sequences; by default 0: drafts are found",
    )


def _add_config(group: Any) -> None:
    defaults = {each.name: each.default for each in fields(SchedulerConfig) if each.default is not MISSING}
    for name, kind in settable_fields().items():
        group.add_argument(
            _FLAG_OF_FIELD.get(name, "--" + name.replace("_", "-")),
            dest=name,
            type=setting(kind),
            metavar=kind.__name__.upper() if kind in (int, float) else "NAME",
            help=f"{_choices(kind)}default {CONFIG.get(name, defaults.get(name))}",
        )


def _choices(kind: type[Any]) -> str:
    return f"{' or '.join(kind)}; " if issubclass(kind, StrEnum) else ""


def _add_report(group: Any) -> None:
    add = group.add_argument
    add("--compare", default="", metavar="VARIANT,...", help="one column each, over the same requests")
    inf = float("inf")
    add("--slo-ttft-ms", type=number(0.0), default=inf, metavar="MS", help="a good request's first token")
    add(
        "--slo-itl-ms",
        type=number(0.0),
        default=inf,
        metavar="MS",
        help="and the mean gap between its tokens",
    )
    add(
        "--find",
        type=setting(Sought),
        metavar="WHAT",
        help="the fewest replicas, or the highest load as a factor of the rate, by which enough requests "
        "keep to the SLO",
    )
    add("--attain", type=share, default=0.99, metavar="SHARE", help="how many are enough (default 0.99)")
    add("--price", type=number(0.0), metavar="PER_HOUR", help="of a replica: what the answer costs an hour")
    add("--json", type=Path, metavar="FILE", help="write the numbers, machine readable")
    add("--plots", type=Path, metavar="DIR", help="draw ttft.svg and queue.svg there")
