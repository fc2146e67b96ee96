"""What no socket may ever reach: a static look at the whole source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from midflight.config import Config

SRC = Path(__file__).resolve().parents[1] / "src" / "midflight"
UNSAFE = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    files = sorted(SRC.rglob("*.py"))
    assert len(files) > 100
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def test_nothing_that_unpickles_is_imported_but_for_objects_that_a_program_gives_its_own_processes_over_a_pipe() -> None:
    found = {
        (path.name, name)
        for path, node in nodes()
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.partition(".")[0] in UNSAFE or name.startswith("multiprocessing")
    }
    assert found == {("given.py", "cloudpickle")}
    given = (SRC / "given.py").read_text()
    assert not any(f"import {name}" in given for name in ("socket", "asyncio", "aiohttp", "starlette", "websockets"))


def test_torch_load_is_called_with_weights_only_and_numpy_without_pickle() -> None:
    calls = [(path.name, node, called(node)) for path, node in nodes() if isinstance(node, ast.Call)]
    assert len(calls) > 1000
    for name, node, function in calls:
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if function in ("torch.load", "torch.serialization.load"):
            assert options.get("weights_only") == "True", f"{name}: {ast.unparse(node)}"
        assert options.get("allow_pickle", "False") == "False", f"{name}: {ast.unparse(node)}"
        assert options.get("trust_remote_code", "False") == "False", f"{name}: {ast.unparse(node)}"
        assert function not in ("eval", "exec"), f"{name}: {ast.unparse(node)}"


def test_secrets_are_compared_in_constant_time() -> None:
    """No `==` between names that hold tokens or secrets."""
    suspicious = ("token", "secret", "api_key")
    for path, node in nodes():
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
            sides = [ast.unparse(side).rpartition(".")[2] for side in (node.left, *node.comparators)]
            named = [side for side in sides if side.endswith(suspicious)]
            assert not named, f"{path.relative_to(SRC)}: {ast.unparse(node)}"


def test_a_gateway_listens_on_loopback_unless_told_otherwise() -> None:
    assert Config().gateway.host == "127.0.0.1"
