"""Truth of the documents: commands, links, options, metrics, fields, error codes, families."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from bench.load import command as load_command
from bench.simulate import command as simulate_command
from engine.adapters.registry import AdapterMetrics
from engine.frontend.metrics import EngineMetrics
from engine.models.load_metrics import LoadMetrics
from engine.models.placement import Reservation
from engine.models.yard import KeepRule, ModelYard
from engine.options.options import DECLARATIONS
from engine.types import FinishReason
from scripts import write_errors_page, write_structure_page
from scripts.write_options_page import PAGE, insert, render
from server.api.chat.protocol import CHAT_REFUSALS, ChatCompletionRequest
from server.api.completions.protocol import COMPLETION_REFUSALS, CompletionRequest
from server.api.pooling.protocol import (
    EMBEDDING_REFUSALS,
    SCORE_REFUSALS,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from server.api.responses.protocol import RESPONSES_REFUSALS, ResponsesRequest
from server.command import command_line
from server.command.startup.launch import EXIT_BAD_MODEL
from server.edge.error_catalogue import CATALOGUE
from server.edge.error_replies import _CODES
from server.edge.observe.http_metrics import HttpMetrics
from server.edge.wire_model import WireModel
from tests.checkpoints import FAMILIES
from tests.deploy.exported import INFO
from tests.for_each import for_each

ROOT = Path(__file__).resolve().parents[2]
CLIENT_FOLDERS = ("batch", "terminal")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "campaigns/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
IMAGES = sorted((ROOT / "docs" / "images").glob("*.svg"))
OF_CLIENTS = {
    *(
        "base-url",
        "concurrency",
        "retry-for",
        "stats",
        "max-tokens",
        "temperature",
        "seed",
        "once",
        "load",
        "unload",
    )
}
OF_PULL = {"revision", "include"}
"""Flags of the commands that talk to a server; docs/clients.md."""
CODE_FOLDERS = ("server", "engine", "scheduler", "worker", "bench", "campaigns")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def code_words(page: str) -> set[str]:
    """Everything between single backticks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)))


def anchors(page: str) -> set[str]:
    """The names that headings get: lower case, without punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Commands.


def commands_of_ci() -> set[str]:
    """Without options that say how much is logged, compiled and recorded, and what runs meanwhile."""
    lines = read(".ci/run").splitlines()
    return {re.sub(r" --(quiet|no-compile|junitxml=\S+)| &$", "", line.strip()) for line in lines}


def test_the_test_command_of_the_readme_is_what_ci_runs() -> None:
    commands = [line for block in fenced(read("README.md"), "sh") for line in block.splitlines()]
    (develop,) = [line for line in commands if "[test]" in line]
    install, test = develop.split(" && ")[-2:]
    assert {install, test} <= commands_of_ci()
    assert develop.startswith("python3 -m venv .venv && . .venv/bin/activate && ")


def test_the_readme_serves_with_the_installed_command() -> None:
    (serve,) = [
        line for block in fenced(read("README.md"), "sh") for line in block.splitlines() if "serve" in line
    ]
    assert "pip install -c constraints-cpu.txt ." in serve.split(" && ")
    command = shlex.split(serve.split(" && ")[-1])
    assert command == ["tokenyard", "serve"]
    assert command[0] in tomllib.loads(read("pyproject.toml"))["project"]["scripts"]


def test_the_gates_of_the_contributors_page_are_those_of_ci() -> None:
    gates = {"ruff check .", "ruff format --check .", "mypy", "python -m pytest -n 3 --dist loadfile"}
    assert gates <= code_words(read("CONTRIBUTING.md"))
    assert gates <= commands_of_ci()


def test_the_page_of_tests_has_the_commands_of_ci() -> None:
    page = code_words(read("docs/testing.md"))
    tiers = {command for command in commands_of_ci() if "python -m pytest" in command}
    assert len(tiers) == 3
    assert tiers <= page


def test_ci_can_be_started_and_its_syntax_is_right() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111 == 0o111
    subprocess.run(["bash", "-n", script], check=True, timeout=30)
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("snippet", fenced(read("README.md"), "python"))
def test_the_readmes_python_is_python(snippet: str) -> None:
    ast.parse(snippet)


# Links and pictures.


@for_each(PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert found.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), target


def test_every_page_is_in_the_index() -> None:
    index = read("docs/README.md")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name == "README.md" or f"({name})" in index, name


@pytest.mark.parametrize("image", IMAGES, ids=name_of)
def test_pictures_are_used_named_and_need_nothing_from_elsewhere(image: Path) -> None:
    text = image.read_text(encoding="utf-8")
    assert "<title" in text
    assert not re.findall(r"(?:href|src|url)\s*[=(]\s*[\"']?(?:http|//)", text)
    assert any(f"images/{image.name})" in page.read_text(encoding="utf-8") for page in PAGES)
    for path in re.findall(r"\b(?:server|engine|scheduler|worker|bench|campaigns)/[\w/.]+", text):
        assert (ROOT / path).exists(), path


# Options.


def test_the_options_page_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == insert(page, render()), "run: python scripts/write_options_page.py"


@for_each(PAGES, ids=name_of)
def test_every_variable_and_flag_of_ours_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    variables = {name.lower() for name in re.findall(r"TOKENYARD_([A-Z_]*[A-Z])\b", text)}
    cluster = {"service_host"}  # a service link, named because it is passed over
    tests = {"test_device"}  # read by tests/worker/gpu/conftest.py alone
    assert variables - cluster - tests <= DECLARATIONS.keys() | {"config"}
    flags = {
        re.split("[ =]", word.removeprefix("--"))[0]
        for word in code_words(text)
        if re.match(r"--\w.*\w$", word)
    }
    others = (
        {
            "extra-index-url",
            "gpus",
            "tmpfs",
            "build-arg",
            "config",
            "help",
            "json",
            "dist",
            "changed",
        }
        | OF_CLIENTS
        | OF_PULL
    )
    if page.name == "coming-from.md":
        others |= {*command_line._OURS, *command_line._NOT_NEEDED, *command_line._PASSED_OVER}
        others |= command_line._WITH_VALUE.keys()
    if page.name in ("simulate.md", "simulator.md"):
        others |= {word.removeprefix("--") for word in simulate_command.build_parser()._option_string_actions}
    if page.name == "bench.md":
        serve = next(each for each in load_command.build_parser()._actions if each.choices).choices["serve"]
        others |= {word.removeprefix("--") for word in serve._option_string_actions}
    assert {flag.removeprefix("no-").replace("-", "_") for flag in flags - others} <= DECLARATIONS.keys()


def test_every_option_is_in_the_table_once() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in DECLARATIONS:
        assert page.count(f"<br>`TOKENYARD_{name.upper()}` |") == 1, name


# Metrics.


def exported() -> dict[str, Metric]:
    """Exported metrics by the name on the page."""
    metrics = EngineMetrics("model", num_engines=2)
    metrics.model_is_ready(0, INFO)
    HttpMetrics(metrics.registry)
    metrics.registry.register(AdapterMetrics(1, lambda: (), lambda: ()))
    room = Reservation(device="cpu", num_bytes=1, budget_bytes=1)
    place = ModelYard(max_waiting=1).add("model", None, KeepRule(), room)
    metrics.registry.register(LoadMetrics(place))
    return {page_name(metric): metric for metric in of_ours(metrics.registry)}


def of_ours(registry: CollectorRegistry) -> list[Metric]:
    return [metric for metric in registry.collect() if metric.name.startswith(("tokenyard:", "vllm:"))]


def page_name(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def documented() -> dict[str, list[str]]:
    """Cells of each metric's row, by name."""
    rows = re.findall(
        r"^\| `((?:tokenyard|vllm):\w+)` \|(.*)\|$", read("docs/operations.md"), flags=re.MULTILINE
    )
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


def test_the_table_of_metrics_and_the_registry_name_the_same() -> None:
    assert documented().keys() == exported().keys()


def test_the_table_of_metrics_gives_types_and_labels() -> None:
    for name, metric in exported().items():
        kind, labels, meaning = documented()[name]
        assert kind == metric.type, name
        assert meaning, name
        has = {label for sample in metric.samples for label in sample.labels} - {"le"}
        if has and labels != "as above":
            assert set(re.findall(r"`(\w+)`", labels)) == has, name


@for_each(PAGES, ids=name_of)
def test_every_metric_that_is_named_is_exported(page: Path) -> None:
    words = {
        word
        for word in code_words(page.read_text(encoding="utf-8"))
        if word.startswith(("tokenyard:", "vllm:"))
    }
    assert {word for word in words if not word.endswith(":")} <= exported().keys()


# The API.


@pytest.mark.parametrize(
    "model",
    [
        CompletionRequest,
        ChatCompletionRequest,
        ResponsesRequest,
        EmbeddingRequest,
        ScoreRequest,
        RerankRequest,
    ],
)
def test_every_field_of_a_request_is_documented(model: type[WireModel]) -> None:
    assert set(model.model_fields) <= code_words(read("docs/api.md"))


def test_every_refused_field_is_documented() -> None:
    refused = COMPLETION_REFUSALS.keys() | CHAT_REFUSALS.keys() | RESPONSES_REFUSALS.keys()
    refused |= EMBEDDING_REFUSALS.keys() | SCORE_REFUSALS.keys()
    assert refused <= code_words(read("docs/api.md"))


def codes_in_source() -> set[str]:
    """Codes that errors bring themselves."""
    found = set()
    for folder in ("server", "engine"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"\bcode(?:: str)? ?= ?\"(\w+)\"", path.read_text(encoding="utf-8")))
    return found


def test_the_catalogue_has_every_code_that_an_error_has_and_no_other() -> None:
    assert codes_in_source() | {code for code in _CODES.values() if code} == CATALOGUE.keys()


def test_the_page_of_errors_is_current() -> None:
    page = write_errors_page.PAGE.read_text(encoding="utf-8")
    current = write_errors_page.insert(page, write_errors_page.render())
    assert page == current, "run: python scripts/write_errors_page.py"


def test_the_exit_codes_are_those_of_the_source() -> None:
    listed = {
        int(code) for code in re.findall(r"^\| (\d+) \|", read("docs/operations.md"), flags=re.MULTILINE)
    }
    server = [path for path in (ROOT / "server").rglob("*.py") if path.parent.name not in CLIENT_FOLDERS]
    source = "\n".join(path.read_text() for path in [*server, *(ROOT / "engine").rglob("*.py")])
    assert listed == {0} | {
        int(code) for code in re.findall(r"^EXIT_\w+ = (\d+)$", source, flags=re.MULTILINE)
    }
    assert EXIT_BAD_MODEL in listed


def test_the_exit_codes_of_the_clients_are_those_of_their_source() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", read("docs/clients.md"), flags=re.MULTILINE)}
    folders = [ROOT / "server" / "command" / name for name in CLIENT_FOLDERS]
    source = "\n".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    codes = {int(code) for code in re.findall(r"^EXIT_\w+ = (\d+)$", source, flags=re.MULTILINE)}
    assert listed == {0} | codes


def test_every_way_to_end_is_on_the_page_of_the_architecture() -> None:
    table = read("docs/architecture.md").split("## How a request ends")[1].split("## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == sorted(FinishReason)


# Stations: `file:function` in a link.


def stations(page: Path) -> list[tuple[str, str, str]]:
    """File, function and target of every link whose text is `file:function`."""
    return re.findall(r"\[`([\w/.]+):(\w+)`\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))


def defined_names(path: Path) -> set[str]:
    """Functions, methods and classes of a Python file; functions of a C++ file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return set(re.findall(r"^\w[\w:<>&* ]*\b(\w+)\(", text, flags=re.MULTILINE))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)}


@for_each(PAGES, ids=name_of)
def test_every_function_that_is_linked_is_in_its_file(page: Path) -> None:
    for file, name, target in stations(page):
        assert (page.parent / target).resolve() == ROOT / file, target
        assert name in defined_names(ROOT / file), f"{file}:{name}"


def test_the_way_of_a_request_has_twelve_stations_from_the_handler_to_the_kernel() -> None:
    way = read("docs/architecture.md").split("## The way of a request")[1].split("\n## ")[0]
    numbers = re.findall(r"^\*\*(\d+)\. ", way, flags=re.MULTILINE)
    assert numbers == [str(number) for number in range(1, 13)]
    parts = re.split(r"^\*\*\d+\. ", way, flags=re.MULTILINE)[1:]
    assert all(re.search(r"\[`[\w/.]+:\w+`\]", part) for part in parts)
    folders = {file.split("/")[0] for file, _, _ in stations(ROOT / "docs" / "architecture.md")}
    assert folders == {"server", "engine", "scheduler", "worker"}


def test_the_page_of_the_architecture_names_each_folder_of_the_four_packages() -> None:
    named = code_words(read("docs/architecture.md"))
    for package in ("server", "engine", "scheduler", "worker"):
        folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
        assert not {name for name in folders if f"{package}/{name}/" not in named}


def test_the_figures_of_the_structure_are_those_of_the_tree() -> None:
    rows = re.findall(r"^\| (.+?) \|([ \d,|]+)\|$", read("docs/structure.md"), flags=re.MULTILINE)
    listed = {
        name: tuple(int(number.replace(",", "")) for number in re.findall(r"[\d,]+", cells))
        for name, cells in rows
    }
    hint = "run: python scripts/write_structure_page.py"
    for name, numbers in write_structure_page.figures().items():
        assert listed[name] == pytest.approx(numbers, rel=0.02, abs=2), f"{name}: {hint}"


# Decisions.

DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


def test_the_index_has_all_decisions_in_order_by_their_titles() -> None:
    rows = re.findall(
        r"^\| \[.+\]\(decisions/([\w-]+\.md)\) \| (.*) \|$", read("docs/README.md"), flags=re.MULTILINE
    )
    assert rows == [(page.name, page.read_text(encoding="utf-8").splitlines()[0][2:]) for page in DECISIONS]
    assert not [name for name, _ in rows if name[0].isdigit()], "a page for a subject, not for a date"


def test_sources_name_decisions_that_there_are() -> None:
    sources = [
        path for folder in (*CODE_FOLDERS, "tests", "tokenyard") for path in (ROOT / folder).rglob("*.py")
    ]
    for path in (*sources, ROOT / "pyproject.toml", ROOT / "setup.py", ROOT / "Dockerfile", ROOT / "NOTICE"):
        for page, anchor in re.findall(
            r"docs/decisions/([\w-]+)(?:\.md)?(?:#([\w-]+))?", path.read_text(encoding="utf-8")
        ):
            found = ROOT / "docs" / "decisions" / f"{page}.md"
            assert found.is_file(), f"{path}: {page}"
            assert not anchor or anchor in anchors(found.read_text(encoding="utf-8")), f"{path}: {anchor}"


# Models, dependencies, layout.


def test_the_tested_families_are_those_that_are_listed() -> None:
    table = read("docs/models.md").split("## Tested families")[1].split("## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    assert {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)} == set(FAMILIES)


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    rows = re.findall(r"^\| `([\w-]+)` \|", read("docs/decisions/dependencies.md"), flags=re.MULTILINE)
    assert sorted(rows) == sorted(re.split(r"[<>=;\[]", text)[0].strip() for text in project["dependencies"])


def test_the_version_is_the_same_in_the_package_the_chart_and_the_changelog() -> None:
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    chart = read("deploy/helm/tokenyard/Chart.yaml")
    assert re.findall(r"^(?:appV|v)ersion: \"?([\d.]+)\"?$", chart, flags=re.MULTILINE) == [version, version]
    releases = re.findall(r"^## ([\d.]+)$", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert releases[0] == version


def test_the_readme_has_a_line_for_each_folder() -> None:
    listed = set(re.findall(r"^\| `(\w+)/` \|", read("README.md"), flags=re.MULTILINE))
    assert {*CODE_FOLDERS, "deploy", "docs", "scripts", "tests"} <= listed
    assert all((ROOT / folder).is_dir() for folder in listed)


@pytest.mark.parametrize("package", ["server", "engine", "scheduler", "worker"])
def test_the_readme_names_every_folder_of_a_package(package: str) -> None:
    (row,) = re.findall(rf"^\| `{package}/` \|(.*)\|$", read("README.md"), flags=re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert set(re.findall(r"`(\w+)`", row)) == folders


@for_each(PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    for word in code_words(page.read_text(encoding="utf-8")):
        if re.fullmatch(
            r"(?:server|engine|scheduler|worker|bench|campaigns|deploy|tests|scripts|docs)/[\w/.-]*", word
        ):
            assert (ROOT / word).exists(), word


def test_every_weakness_of_another_server_that_is_named_has_a_test_that_names_it() -> None:
    named = re.compile(r"CVE-\d{4}-\d+").findall
    sources = [path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {weakness for path in (*sources, *PAGES) for weakness in named(path.read_text(encoding="utf-8"))}
    tests = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert found
    assert found <= {weakness for text in tests for weakness in named(text)}


def test_importing_the_page_writer_writes_nothing() -> None:
    code = "import scripts.write_options_page"
    before = PAGE.stat().st_mtime_ns
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)
    assert PAGE.stat().st_mtime_ns == before
