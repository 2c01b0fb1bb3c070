"""The rules that keep the parts apart, and the pages short. They are checked, because prose decays."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tokenyard", "server", "engine", "scheduler", "worker", "bench", "campaigns")
INSTALLED = PACKAGES[:-1]

MAY_IMPORT = {
    "tokenyard": {"server"},  # the command, which is all that it is
    "server": {"server", "engine"},
    "engine": {"engine", "scheduler", "worker"},
    "scheduler": {"scheduler"},
    "worker": {"worker"},
    "bench": {"bench", "scheduler"},  # the simulator drives the very same scheduler
    "campaigns": {"campaigns", "bench", "scheduler"},
}
# The same for one folder: what measures the GPU path drives the worker itself, with no process between. What
# looks at single kernels may have any module of a package.
FOLDER_DOORS = {
    ("campaigns/gpu/", "worker.worker"),
    ("campaigns/gpu/", "worker.worker_config"),
    ("campaigns/gpu/tune/", "worker"),
    ("campaigns/gpu/one_kernel/", "worker"),
    # The host's part of a step is the engine's loop over a worker without a model.
    ("campaigns/adapters.py", "worker.worker"),
    ("campaigns/adapters.py", "worker.worker_config"),
    ("campaigns/drafts.py", "worker.worker"),
    ("campaigns/drafts.py", "worker.worker_config"),
    ("campaigns/step_ratio.py", "worker"),  # steps of several forms, by turns
    ("campaigns/gpu/host_step.py", "engine"),
    ("campaigns/gpu/host_step.py", "worker"),
    ("campaigns/gpu/null_device.py", "worker"),
}
# Single doors through which a wall may be passed.
DOORS = {
    ("worker", "scheduler.messages"),  # the plan is the worker's only way to hear of the scheduler,
    ("worker", "scheduler.cache_groups"),  # but for the words that both have for what layers keep
    ("worker", "scheduler.input_messages"),
    # One HTTP client for the commands that talk to a server and for what measures one.
    ("bench", "server.edge.http.http_client"),
    ("campaigns", "server.edge.http.http_client"),
}
# What the API process loads of packages that are the engine process's. They import no torch.
SHARED_WITH_API = {
    *("scheduler", "scheduler.config", "scheduler.counters", "scheduler.messages", "scheduler.policy"),
    *("scheduler.draft_messages", "scheduler.input_messages", "scheduler.cache_groups"),
    *("scheduler.group_places", "scheduler.longest_hit", "scheduler.prefix_keys", "scheduler.tenant_ledger"),
    *("worker", "worker.worker_config", "worker.worker_errors"),
    *("worker.doctor_findings", "worker.machine", "worker.memory_sizes"),
}

# No docstring that begins so can be read without the name above it.
HEADLESS = {
    *("all of", "all that", "all there", "as", "by", "how", "nobody", "none", "nothing", "of", "so", "that"),
    *("those", "what", "where", "which", "who", "whoever", "whom", "whose", "why"),
}

MAX_FOLDER_FILES = 14
NEEDS_AN_EXTRA = {"otel_spans.py", "decoding.py"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50

# What would make a decision depend on anything but its arguments, or reach beyond this machine.
FORBIDDEN_IN_SCHEDULER = {
    "torch",
    "asyncio",
    "time",
    "random",
    "threading",
    "socket",
    "os",
    "logging",
    "datetime",
}
# These write the time of day for others to read. A deadline or a duration by it would jump with it.
READS_TIME_OF_DAY = {
    *(
        "engine/adapters/registry.py",
        "engine/frontend/client.py",
    ),
    *("engine/journal.py", "engine/reports/kv_publisher.py", "engine/text/template_language.py"),
    *(
        "server/reply/generate/answering.py",
        "server/edge/http/request_log.py",
        "server/api/ollama/endpoints.py",
        "server/api/ollama/model_routes.py",
    ),
    *("server/api/responses/making.py", "server/api/responses/responses.py", "server/api/batches/access.py"),
}
TIMES_OF_DAY = {
    ("time", "time"),
    ("time", "time_ns"),
    *(("datetime", each) for each in ("now", "utcnow", "today")),
}
TIMES_OF_DAY |= {("date", "today")}
# By these a process group would listen on all addresses of the machine; a file is in a folder of the user's.
OPEN_STORES = {"TCPStore", "init_method", "PrefixStore"}
FORBIDDEN_ANYWHERE = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
FORBIDDEN_WEB_IN_ENGINE = {"fastapi", "starlette", "uvicorn"}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """Parse once for all rules: every node of `source`, outer ones first."""
    return list(ast.walk(ast.parse(source)))


def imports(source: str) -> Iterator[tuple[int, str]]:
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.lineno, node.module or ""


def times_of_day(source: str) -> list[int]:
    """Lines that read the time of day; the modules keep their names."""
    found = []
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute):
            named = [(ast.unparse(node.value).split(".")[-1], node.attr)]
        elif isinstance(node, ast.ImportFrom):
            named = [(node.module or "", each.name) for each in node.names]
        elif isinstance(node, ast.Import):
            named = [("time", "time") for each in node.names if each.name == "time" and each.asname]
        else:
            continue
        found += [node.lineno for each in named if each in TIMES_OF_DAY]
    return found


def import_faults(source: str, file: str) -> list[str]:
    """Every import in `source`, which stands in `file`, that breaks a rule."""
    package = file.split("/")[0]
    faults = []
    for line, module in imports(source):
        top = module.split(".")[0]
        is_ours = top in PACKAGES
        is_wrong = is_ours and top not in MAY_IMPORT[package] and (package, module) not in DOORS
        doors = {door for folder, door in FOLDER_DOORS if file.startswith(folder)}
        is_wrong &= doors.isdisjoint({module, top})
        is_wrong |= top in FORBIDDEN_ANYWHERE
        if package == "scheduler":
            is_wrong |= top in FORBIDDEN_IN_SCHEDULER
            is_wrong |= not is_ours and top not in sys.stdlib_module_names
        if package == "engine":
            is_wrong |= top in FORBIDDEN_WEB_IN_ENGINE
        if is_wrong:
            faults.append(f"{file}:{line} imports {module}")
    return faults


def length_faults(source: str, file: str) -> list[str]:
    faults = []
    num_lines = source.count("\n")
    if num_lines > MAX_FILE_LINES:
        faults.append(f"{file} has {num_lines} lines")
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                faults.append(f"{file}:{node.lineno} {node.name} has {length} lines")
    return faults


def danger_faults(source: str, file: str) -> list[str]:
    """Calls that could run what a file or a client brings."""
    faults = []
    for node in nodes_of(source):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in {"eval", "exec", "torch.load", "os.system"}:
            faults.append(f"{file}:{node.lineno} calls {name}")
        if arguments.get("shell") == "True" or arguments.get("trust_remote_code") == "True":
            faults.append(f"{file}:{node.lineno} trusts too much in {name}")
    return faults


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_keeps_to_its_side_of_the_walls(package: str) -> None:
    sources = [(path.read_text(), path.relative_to(ROOT).as_posix()) for path in python_files(package)]
    assert not [fault for each in sources for fault in import_faults(*each) + danger_faults(*each)]


@pytest.mark.parametrize("package", [*PACKAGES, "tests", "scripts"])
def test_a_file_and_its_functions_fit_on_a_page(package: str) -> None:
    sources = [(path.read_text(), path.relative_to(ROOT).as_posix()) for path in python_files(package)]
    assert not [fault for each in sources for fault in length_faults(*each)]


def test_the_rules_notice_what_is_planted() -> None:
    assert import_faults("import torch", "scheduler/policy.py")
    assert import_faults("from time import monotonic", "scheduler/policy.py")
    assert import_faults("import msgspec", "scheduler/policy.py")
    assert import_faults("from engine.types import Health", "scheduler/policy.py")
    assert import_faults("from scheduler.messages import BlockId", "server/reply/generate/sse.py")
    assert import_faults("from worker.worker import Worker", "server/reply/generate/sse.py")
    assert import_faults("from scheduler.scheduler import Scheduler", "worker/worker.py")
    assert import_faults("from worker.worker import Worker", "campaigns/stack_cost.py")
    assert import_faults("from worker.attention.kv_cache import KVCache", "campaigns/gpu/driving.py")
    assert not import_faults("from worker.worker import Worker", "campaigns/gpu/driving.py")
    assert import_faults("import fastapi", "engine/frontend/client.py")
    assert import_faults("import pickle", "engine/processes/transport.py")
    assert not import_faults("from scheduler.messages import SchedulerOutput", "worker/worker.py")
    assert length_faults("def f():\n" + "    pass\n" * 60, "a.py")
    assert length_faults("\n" * 501, "a.py")
    assert danger_faults("AutoModel.from_pretrained(x, trust_remote_code=True)", "a.py")
    assert danger_faults("eval(text)", "a.py")


def modules_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if path.name not in {"__init__.py", "__main__.py"}]


def folders(*packages: str) -> list[Path]:
    """Every folder of `packages` that holds Python code."""
    return sorted({path.parent for path in python_files(*packages)})


def process_of(folder: Path) -> str:
    """Process in which a folder's modules are loaded, from the parentheses of its first line."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    first = docstring.partition("\n")[0]
    found = re.fullmatch(r".*\((.+)\)\.", first)
    assert found is not None, f"{folder}/__init__.py does not end its first line with (a process)"
    return found.group(1)


def floor_arrows(package: str, *, depth: int) -> dict[str, set[str]]:
    """Imports between the floors of a package, inside functions too: its folders, and its loose modules."""
    arrows = defaultdict(set)
    for path in python_files(package):
        source = floor_of(path.relative_to(ROOT).with_suffix("").parts, depth)
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            targets = {
                floor_of(tuple(name.split(".")), depth) for name in names if name.split(".")[0] == package
            }
            arrows[source] |= targets - {source}
    return arrows


def floor_of(parts: tuple[str, ...], depth: int = 1) -> str:
    """Name the floor of a module: `gpu` for worker.gpu.kernels.norm, `gpu.kernels` one floor deeper."""
    return ".".join(parts[1 : depth + 1]) or parts[0]


def arrows_in_circles(arrows: dict[str, set[str]]) -> set[tuple[str, str]]:
    def reached_from(floor: str) -> set[str]:
        reached: set[str] = set()
        waiting = [floor]
        while waiting:
            new = arrows.get(waiting.pop(), set()) - reached
            reached |= new
            waiting += new
        return reached

    return {
        (floor, target)
        for floor, targets in arrows.items()
        for target in targets
        if floor in reached_from(target)
    }


@pytest.mark.parametrize(
    ("package", "depth"), [("server", 1), ("server", 2), ("engine", 2), ("scheduler", 2), ("worker", 1)]
)
def test_no_folders_of_a_package_import_each_other_in_a_circle(package: str, depth: int) -> None:
    assert not arrows_in_circles(floor_arrows(package, depth=depth))


def test_only_the_choice_of_kernels_asks_whether_the_device_is_a_gpu() -> None:
    asking = {
        path.relative_to(ROOT).as_posix()
        for path in python_files("worker")
        for node in nodes_of(path.read_text())
        if isinstance(node, ast.Attribute) and node.attr == "is_gpu"
    }
    assert asking <= {"worker/startup/kernel_choice.py"}


def headless_docstrings(source: str, file: str = "a.py") -> list[str]:
    """First lines of docstrings, those of fields too, that begin with a word which hangs in the air."""
    found = []
    for node in nodes_of(source):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            first = str(node.value.value).strip().partition("\n")[0]
            words = re.findall(r"[a-z]+", first.lower())[:2]
            if words[:1] and (words[0] in HEADLESS or " ".join(words) in HEADLESS):
                found.append(f"{file}:{node.lineno} {first}")
    return found


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_a_docstring_begins_with_a_noun_or_a_verb(package: str) -> None:
    sources = [(path.read_text(), path.relative_to(ROOT).as_posix()) for path in python_files(package)]
    assert not [fault for each in sources for fault in headless_docstrings(*each)]


def test_the_rules_for_circles_and_docstrings_notice_what_is_planted() -> None:
    assert arrows_in_circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {
        ("a", "b"),
        ("b", "c"),
        ("c", "a"),
    }
    assert not arrows_in_circles({"a": {"b", "c"}, "b": {"c"}})
    assert floor_of(("worker", "gpu", "kernels", "norm")) == "gpu"
    assert floor_of(("worker", "gpu", "kernels", "norm"), depth=2) == "gpu.kernels"
    assert headless_docstrings('class A:\n    """What it is."""\n    b: int\n    """Of all that."""')
    assert headless_docstrings('"""`None` of them."""')
    assert not headless_docstrings('"""Whether it is. What follows is free."""')


def test_a_folder_holds_about_a_dozen_files() -> None:
    assert not [folder for folder in folders(*INSTALLED) if len(modules_in(folder)) > MAX_FOLDER_FILES]


def loaded_by(code: str, *, also: Collection[str] = ("torch", "transformers")) -> set[str]:
    """Every module of ours or of `also` that is loaded once `code` has run in an interpreter of its own."""
    code = f"import sys\n{code}\nprint(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
    return {name for name in done.stdout.split() if name.split(".")[0] in {*PACKAGES, *also}}


def imports_of(process: str) -> str:
    """Code that imports every module which is loaded in `process`."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in folders("server", "engine")
        if process in process_of(folder)
        for path in modules_in(folder)
        if path.name not in NEEDS_AN_EXTRA and "__name__ ==" not in path.read_text()  # no program by itself
    ]
    assert names
    return f"import {', '.join(names)}"


def test_the_api_process_loads_nothing_of_the_engine_process() -> None:
    """Neither torch, which costs seconds at start and memory for good, nor the scheduler or the loop."""
    loaded = loaded_by(imports_of("API"))
    assert not {"torch", "transformers", "PIL"} & loaded
    strangers = {
        name
        for name in loaded - SHARED_WITH_API
        if not ROOT.joinpath(*name.split(".")).is_dir()  # a folder on the way holds no code
        if "API" not in process_of(folder_of(name)) and "every process" not in process_of(folder_of(name))
    }
    assert not strangers


def test_a_server_starts_without_what_few_requests_need() -> None:
    """Vectors need numpy. In each type that FastAPI is given it looks for pydantic's first version."""
    loaded = loaded_by("import server.command.startup.serving", also=("numpy", "pydantic"))
    assert "pydantic" in loaded
    assert not {"numpy", "pydantic.v1"} & loaded


def folder_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path if path.is_dir() else path.parent


def test_the_engine_process_loads_nothing_of_the_server() -> None:
    loaded = loaded_by("import engine.core.process")
    assert not [name for name in loaded if name.startswith(("server", "engine.frontend", "bench"))]


def test_deadlines_and_durations_are_by_clocks_that_do_not_jump() -> None:
    sources = [
        (path.read_text(), path.relative_to(ROOT).as_posix())
        for path in python_files("server", "engine", "scheduler", "worker")
    ]
    assert {file for source, file in sources if times_of_day(source)} == READS_TIME_OF_DAY
    for each in ("time.time()", "datetime.datetime.now()", "from time import time_ns", "import time as t"):
        assert times_of_day(each), each


def test_no_process_group_meets_at_an_open_port() -> None:
    def faults(source: str) -> set[str]:
        nodes = [*nodes_of(source)]
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {each.name for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names}
        return OPEN_STORES & (names | {node.arg for node in nodes if isinstance(node, ast.keyword)})

    assert not [path for path in python_files("engine", "worker") if faults(path.read_text())]
    assert faults("dist.init_process_group('nccl', init_method='env://')")
