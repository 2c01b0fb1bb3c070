"""A checkpoint fetched from a hub into the hub's own cache, where `serve` finds it by name.

Owns: the choice of files, the comparison with the checksums that the hub publishes, and the list of them that
is kept.
Never: runs while a server does: fetching is a command of its own. Fetches what can run code: pickles, Python.

The transfer is huggingface_hub's: it resumes, follows HF_ENDPOINT to a mirror, HF_HOME and HF_HUB_CACHE to
the cache, and HF_TOKEN to private models. Answers are checked before it reads them (hub_answers.py).
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from errno import ENOSPC
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from engine.hub_answers import HubAnswers, HubLies, check_commit, check_file, check_text
from worker.checkpoint.checksums import digest_of
from worker.checkpoint.tokenizer_files import TOKENIZER
from worker.worker_errors import StartupError

_TEXTS = ("*.json", "*.jinja")
_VOCABULARIES = ("tokenizer.model", "tiktoken.model", "*.tiktoken")
"""For models without a tokenizer.json."""
_WEIGHTS = "*.safetensors"
_GGUF = "*.gguf"
# Weights of other programs, in folders of the same repository.
_FOREIGN = ("onnx/*", "openvino/*", "original/*", "coreml/*", "*.bin.index.json")
_SPARE_BYTES = 64 << 20
_NUM_TRANSFERS = 8
_NO_HUB_ERRORS = (OSError, ValueError, TypeError, KeyError, RecursionError)
_MAX_REASON_CHARS = 200


class PullFailed(Exception):
    """Reason why a model was not fetched, and what to do."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")


class NoHub(PullFailed):
    """No hub answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    name: str
    host: str
    commit: str
    sizes: Mapping[str, int]
    """Bytes of each file that is to be fetched."""
    digests: Mapping[str, str]
    """SHA-256 that the hub publishes, by file; it has none of small texts."""
    answers: HubAnswers

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    folder: Path
    checksums: Path
    """List of the SHA-256 of its files, as --checksums takes it."""


def plan_pull(name: str, *, revision: str, include: Sequence[str] = ()) -> Plan:
    """Ask the hub what there is, and choose. `include` are patterns of files in the place of all weights.

    Raises PullFailed, OSError.
    """
    from huggingface_hub import HfApi, constants

    answers = HubAnswers()
    answers.watch()
    info = _asking(lambda: HfApi().model_info(name, revision=revision, files_metadata=True), name, revision)
    try:
        siblings = {check_text(each.rfilename): each for each in info.siblings or ()}
        files = _choose(tuple(siblings), include, name)
        digests = {file: siblings[file].lfs.sha256 for file in files if siblings[file].lfs}
        answers.commit = check_commit(info.sha)
        sizes = {file: check_file(file, siblings[file].size, digests.get(file)) for file in files}
    except HubLies as error:
        raise _lied(error) from error
    return Plan(
        name=name,
        host=constants.ENDPOINT,
        commit=answers.commit,
        sizes=sizes,
        digests=digests,
        answers=answers,
    )


def pull(plan: Plan, *, revision: str) -> Pulled:
    """Fetch the files of a plan that are not there; compare and list all. Raises PullFailed, OSError."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    _check_room(cache, plan)
    _asking(lambda: _fetch(plan), plan.name, revision)
    repository = cache / "--".join(["models", *plan.name.split("/")])
    folder = repository / "snapshots" / plan.commit
    if revision != plan.commit:  # under which name the cache finds it
        (repository / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(plan.commit, encoding="utf-8")
    digests = {file: _digest(folder / file) for file in plan.files}
    for file, digest in plan.digests.items():
        if digests[file] != digest:
            real = (folder / file).resolve()
            real.unlink(missing_ok=True)
            raise PullFailed(f"{file} did not arrive as the hub has it", "it was removed: run this again")
    checksums = repository / f"SHA256SUMS.{plan.commit[:12]}"
    checksums.write_text("".join(f"{digest}  {file}\n" for file, digest in digests.items()), encoding="utf-8")
    return Pulled(folder=folder, checksums=checksums)


def _fetch(plan: Plan) -> None:
    """Fetch by commit, which is checked, some files at a time."""
    from huggingface_hub import hf_hub_download

    def fetch(file: str) -> None:
        plan.answers.expect(plan.sizes[file])
        hf_hub_download(plan.name, file, revision=plan.commit)

    with ThreadPoolExecutor(_NUM_TRANSFERS) as pool:
        try:
            list(pool.map(fetch, plan.files))
        except BaseException:
            plan.answers.end()  # the pool waits for those under way
            raise


def _lied(error: HubLies) -> PullFailed:
    return PullFailed(f"the hub answers with {error}", "take the model from a hub that you trust")


def _choose(names: Sequence[str], include: Sequence[str], name: str) -> tuple[str, ...]:
    def matching(patterns: Sequence[str]) -> list[str]:
        kept = (each for each in names if not any(fnmatch(each, foreign) for foreign in _FOREIGN))
        return [each for each in kept if any(fnmatch(each, pattern) for pattern in patterns)]

    weights = matching(include or (_WEIGHTS,))
    if weights:
        others = () if TOKENIZER in names else _VOCABULARIES
        return tuple(dict.fromkeys([*matching((*_TEXTS, *others)), *weights]))
    if include:
        raise PullFailed(f"{name} has no file like {', '.join(include)}", f"it has {_shown(names)}")
    files = matching((_GGUF,))
    if files:
        raise PullFailed(f"{name} has GGUF files only: {_shown(files)}", "choose one with --include")
    raise PullFailed(
        f"{name} has no *.safetensors files (it has {_shown(names)}), and others can run code",
        "look for a copy of the model that has them",
    )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


def _check_room(cache: Path, plan: Plan) -> None:
    folder = next(each for each in (cache, *cache.parents) if each.is_dir())
    is_there = cache / "--".join(["models", *plan.name.split("/")]) / "snapshots" / plan.commit
    there = sum((is_there / file).stat().st_size for file in plan.files if (is_there / file).is_file())
    free = shutil.disk_usage(folder).free
    if plan.num_bytes - there + _SPARE_BYTES > free:
        raise PullFailed(
            f"{plan.num_bytes - there:,} bytes are to be fetched, and {folder} has {free:,} left",
            "free some, or let HF_HOME name another folder",
        )


def _digest(path: Path) -> str:
    try:
        return digest_of(path, on_read=lambda _: None)
    except StartupError as error:
        raise PullFailed(error.what, error.fix) from error


def _asking(ask: Callable[[], Any], name: str, revision: str) -> Any:
    """Ask the hub; its errors become PullFailed. Raises OSError too, of the cache."""
    from huggingface_hub import constants, errors

    host = constants.ENDPOINT
    try:
        return ask()
    except HubLies as error:
        raise _lied(error) from error
    except errors.OfflineModeIsEnabled as error:
        raise NoHub(
            "HF_HUB_OFFLINE forbids to ask a hub", "unset it, or copy the folder of a model"
        ) from error
    except errors.GatedRepoError as error:
        fix = "accept them there, and set HF_TOKEN to a token of yours"
        raise PullFailed(f"{name} has terms that {host} wants accepted first", fix) from error
    except errors.RepositoryNotFoundError as error:
        fix = "check the name; for one that is not public, set HF_TOKEN"
        raise PullFailed(f"{host} has no model {name}", fix) from error
    except errors.RevisionNotFoundError as error:
        raise PullFailed(f"{name} has no revision {revision}", "name a branch, a tag or a commit") from error
    except errors.HFValidationError as error:
        raise PullFailed(f"{name!r} is no name of a model", "write ORG/NAME") from error
    except (errors.HTTPError, *_NO_HUB_ERRORS) as error:  # type: ignore[attr-defined]
        if isinstance(error, OSError) and (error.filename or error.errno == ENOSPC):
            raise  # it is of the cache
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
        raise NoHub(
            f"{host} cannot be reached or does not answer as a hub does ({reason})",
            "check the network, let HF_ENDPOINT name a mirror, or copy the folder of a model: "
            "`tokenyard serve ./folder` needs no hub. What has arrived is kept",
        ) from error
