"""What our plugin takes of servers beyond their documented interfaces: listed in one place, and looked for before a server starts."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from midflight.engines.servers.command import INSIDE

sys.path.append(str(INSIDE))
import midflight_needs


def taken(path: Path) -> set[tuple[str, str]]:
    """(module, name) of each import of a server."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in midflight_needs.NEEDS:
            found |= {(node.module or "", alias.name) for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted(INSIDE.glob("*.py")), ids=lambda path: path.stem)
def test_each_import_of_a_server_is_in_the_list(path: Path) -> None:
    listed = {(module, name) for needs in midflight_needs.NEEDS.values() for module, names in needs.items() for name in names}
    modules = {module for module, _ in listed}
    unlisted = {(module, name) for module, name in taken(path) - listed if f"{module}.{name}" not in modules}
    assert unlisted <= {("sglang.srt.managers", "io_struct")}


def test_each_function_of_sglang_that_a_hook_stands_around_is_in_the_list() -> None:
    source = (INSIDE / "midflight_in_sglang.py").read_text()
    hooked = set(re.findall(r'^ +"(\w+)": _\w+,$', source, re.M)) | set(re.findall(r'[\w}]\.([A-Za-z_]+)",?$', source, re.M))
    listed = {name for names in midflight_needs.NEEDS["sglang"].values() for name in names}
    assert len(hooked) >= 11 and hooked - {"__init__", "scheduler_components"} <= listed


def test_a_release_that_lacks_a_part_is_refused_with_one_sentence_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "someserver").mkdir()
    (tmp_path / "someserver" / "__init__.py").write_text("")
    (tmp_path / "someserver" / "weights.py").write_text("class Loader:\n    def load(self): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    needs = {"someserver.weights": ("Loader", "load"), "someserver.gone": ("Part",)}
    assert list(midflight_needs.missing(needs)) == ["someserver.gone: Part"]
    monkeypatch.setitem(midflight_needs.NEEDS, "someserver", needs)
    said = (
        "Midflight's plugin in someserver of this interpreter needs someserver.gone: Part, which is not there; use the release of it that"
    )
    with pytest.raises(ImportError, match=re.escape(said)):
        midflight_needs.check("someserver")
    (tmp_path / "someserver" / "gone.py").write_text("Part = 1\n")
    midflight_needs.check("someserver")
