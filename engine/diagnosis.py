"""Checks of everything that could keep the server from starting, without starting it."""

import importlib.metadata
import json
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from engine.models.entries import ModelSpec, resolve_models
from engine.models.memory_shares import MAX_SURVEY_S, plan_lines, planned, run_survey
from engine.options.engine_config import EngineConfig
from engine.options.options import OptionError, Options
from engine.processes import child_process
from engine.processes.runtime_directory import RuntimeDirectory
from engine.text.chat_template import NoRenderer
from engine.text.checkpoint_texts import load_texts
from engine.text.tokenizer import TokenizerError
from worker.checkpoint.checkpoint_files import find_weights
from worker.checkpoint.checksums import Checksums
from worker.doctor_findings import Finding, Verdict
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

__all__ = ["Finding", "Verdict", "diagnose"]

_MIN_TEMPORARY_BYTES = 16 << 20
_BOUND = re.compile(r"(>=|<|==)([\d.]+)")


def diagnose(options: Options, more: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the findings in the order in which `serve` meets them; `more` are models behind the first."""
    yield _fine("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield _packages()
    yield _limits()
    yield _runtime_directory()
    try:
        models, _ = resolve_models(options, more)
    except OptionError as error:
        yield _fault("options", f"{error.what}: {error.why}", error.fix)
        yield Finding(topic="model", verdict=Verdict.UNKNOWN, what="not looked at: the options come first")
        return
    for spec in models:
        for finding in _model(spec):
            is_milder = finding.verdict is Verdict.FAULT and not spec.keep.at_start
            yield replace(finding, verdict=Verdict.WARNING) if is_milder else finding
    if len(models) > 1:
        yield from _plan(models)


def _model(spec: ModelSpec) -> Iterator[Finding]:
    """Look at one model. A fault of one on demand keeps no other back, so that it is a warning."""
    config = spec.engine
    if spec.fault:
        yield _fault("model", f"{config.served_names[0]} cannot be loaded: {spec.fault}", "")
        return
    yield _fine("options", f"model {config.model_path}, served as {', '.join(config.served_names)}")
    yield from _checksums(config.worker)
    yield from _texts(config)
    yield from _survey(config.worker)


def _plan(models: Sequence[ModelSpec]) -> Iterator[Finding]:
    """Foresee how the models share the memory."""
    try:
        for line in plan_lines(planned(models)[1]):
            yield _fine("memory plan", line)
    except OptionError as error:
        yield _fault("memory plan", error.why, error.fix)


def _packages() -> Finding:
    """Compare installed versions with the bounds in our metadata."""
    try:
        requirements = importlib.metadata.requires("tokenyard") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            topic="packages",
            verdict=Verdict.WARNING,
            what="tokenyard itself is not installed, so that the bounds of its packages are not known",
            fix="pip install it",
        )
    needed = [text for text in requirements if ";" not in text]  # the others belong to extras
    wrong = [found for text in needed if (found := _out_of_bounds(text))]
    if wrong:
        return _fault("packages", ", ".join(wrong), "pip install --upgrade tokenyard, in a fresh environment")
    return _fine("packages", f"all {len(needed)} are there, in the versions that they are needed in")


def _out_of_bounds(requirement: str) -> str:
    """Explain how a requirement such as `torch<3,>=2.11` is not met; empty if it is."""
    name = re.split(r"[<>=!~\[ ]", requirement)[0]
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is missing"
    bounds = [(operator, _numbers(bound)) for operator, bound in _BOUND.findall(requirement)]
    met = {
        ">=": lambda bound: _numbers(version) >= bound,
        "<": lambda bound: _numbers(version) < bound,
        "==": lambda bound: _numbers(version) == bound,
    }
    if all(met[operator](bound) for operator, bound in bounds):
        return ""
    return f"{name} is {version}, but must be {requirement.removeprefix(name)}"


def _numbers(version: str) -> tuple[int, ...]:
    """Parse a version without trailing zeros: 2.13.0+cpu is (2, 13)."""
    numbers = [int(word) for word in re.findall(r"\d+", version.split("+")[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _limits() -> Finding:
    """Check the limit on addresses, which counts the KV cache as soon as it is mapped."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return _fine("limits", "addresses are not limited")
    return Finding(
        topic="limits",
        verdict=Verdict.WARNING,
        what=f"a process may have no more than {soft / (1 << 30):.1f} GiB of addresses, used or not",
        fix="lift it (ulimit -v unlimited), or keep --kv-cache-memory far below",
    )


def _runtime_directory() -> Finding:
    """Check the folder for the sockets between the two processes."""
    fix = "set TMPDIR to a folder that may be written to, /dev/shm say"
    try:
        directory = RuntimeDirectory.make()
    except OSError as error:
        return _fault("runtime folder", f"none can be made: {error}", fix)
    try:
        free_bytes = shutil.disk_usage(directory.path).free
        parent = directory.path.parent
        if free_bytes < _MIN_TEMPORARY_BYTES:
            return _fault("runtime folder", f"{parent} has only {free_bytes >> 20} MiB left", "free some")
        return _fine("runtime folder", f"in {parent}, which may be written to")
    finally:
        directory.remove()


def _checksums(config: WorkerConfig) -> Iterator[Finding]:
    """Compare all files with the list, as `serve` does; this reads the weights completely."""
    if config.checksums_file is None:
        return
    folder = Path(config.model_path)
    try:
        checksums = Checksums.read(Path(config.checksums_file))
        num_texts = checksums.check_texts(folder)
        weights = find_weights(folder)
        checksums.check_weights(folder, [file.path for file in weights], lambda _: None)
    except StartupError as error:
        yield _fault("checksums", error.what, error.fix)
        return
    what = f"{num_texts} texts and {len(weights)} safetensors are as {checksums.path} lists them"
    yield _fine("checksums", what)


def _texts(config: EngineConfig) -> Iterator[Finding]:
    try:
        texts = load_texts(config.worker, config.media)
        with closing(texts.template):
            texts.trial.judge()
            texts.template.judge()
    except TokenizerError as error:
        yield _fault("tokenizer", error.what, error.fix)
        return
    except NoRenderer as error:
        yield _fault("chat template", error.what, error.fix)
        return
    yield _fine("tokenizer", "readable")
    if texts.template.is_present:
        yield _fine("chat template", "readable")
    else:
        yield Finding(
            topic="chat template",
            verdict=Verdict.WARNING,
            what="the checkpoint has none: /v1/chat/completions will be refused",
            fix="serve a checkpoint with one, or name a file with --chat-template",
        )


def _survey(config: WorkerConfig) -> Iterator[Finding]:
    """Check torch and the device in another process: importing torch may fail."""
    try:
        done = run_survey(json.dumps(asdict(config)))
    except subprocess.TimeoutExpired:
        yield _fault(
            "device",
            f"torch and the device gave no answer within {MAX_SURVEY_S:.0f} s",
            "see whether `python -c 'import torch; torch.cuda.is_available()'` ends",
        )
        return
    for line in done.stdout.splitlines():
        found = json.loads(line)
        yield Finding(**{**found, "verdict": Verdict(found["verdict"])})
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        end = child_process.describe_exit(done.returncode)
        yield _fault("device", f"the process that looks at it {end}: {reason}", "")


def _fine(topic: str, what: str) -> Finding:
    return Finding(topic=topic, verdict=Verdict.OK, what=what)


def _fault(topic: str, what: str, fix: str) -> Finding:
    return Finding(topic=topic, verdict=Verdict.FAULT, what=what, fix=fix)
