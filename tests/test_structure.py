"""The bounds of the whole: how much a module may import, how deep imports go, what names may mean."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from tests.test_architecture import ROOT, nodes_of, python_files

PRODUCT = ("server", "engine", "scheduler", "worker")
MAX_IMPORTED_MODULES = 15
MAX_IMPORT_DEPTH = 20
ASSEMBLIES = {"server.endpoints": 19}
"""Modules that put a process, a model or a list together, and how many modules each imports."""


@cache
def modules() -> dict[str, ast.Module]:
    """The modules of the product by their dotted names; a folder stands for its `__init__.py`."""
    named = {}
    for path in python_files(*PRODUCT):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = nodes_of(path.read_text())[0]
        assert isinstance(module, ast.Module)
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = module
    return named


def imported_at_once(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run when a module is loaded: not those in functions, or for types alone."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield from imported_at_once([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from imported_at_once(node.body)


@cache
def imports_of(module: str) -> frozenset[str]:
    """The modules of the product that `module` imports at once."""
    found = set()
    for node in imported_at_once(modules()[module].body):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            known = name if name in modules() else name.rpartition(".")[0]
            if known in modules():
                found.add(known)
    return frozenset(found - {module})


@cache
def longest_chain(module: str) -> tuple[str, ...]:
    """The longest chain of imports from `module` down; it itself is the first."""
    return (module, *max((longest_chain(each) for each in imports_of(module)), key=len, default=()))


def test_a_module_imports_at_most_fifteen_others() -> None:
    found = {name: len(imports_of(name)) for name in modules()}
    many = {name: number for name, number in found.items() if number > MAX_IMPORTED_MODULES}
    assert not {name: number for name, number in many.items() if number > ASSEMBLIES.get(name, 0)}
    assert not ASSEMBLIES.keys() - many.keys(), "these may leave the list"


def test_no_chain_of_imports_is_deeper_than_twenty_modules() -> None:
    chain = max(map(longest_chain, modules()), key=len)
    assert len(chain) <= MAX_IMPORT_DEPTH, chain


def test_the_name_of_a_class_means_one_thing() -> None:
    homes = defaultdict(set)
    for path in python_files(*PRODUCT):
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(path.relative_to(ROOT).as_posix())
    assert not {name: found for name, found in homes.items() if len(found) > 1}
