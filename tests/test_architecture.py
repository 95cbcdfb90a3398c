"""The imports follow the architecture: manifolds at the bottom, experiments at the top, and torch alone below."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "manifolds": set(),
    "optim": {"manifolds"},
    "attention": {"manifolds"},
    "analysis": {"manifolds"},
    "experiments": {"manifolds", "optim", "attention", "analysis"},
    "benchmarks": {"manifolds", "optim", "attention", "analysis"},
}


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_lies_below_it(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        depth = len(path.relative_to(ROOT).parts) - 1
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level > depth:
                target = (node.module or "").split(".")[0]
                assert target in ALLOWED[folder], f"{path.relative_to(ROOT)}:{node.lineno} imports {target}"
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                assert not name.startswith("geodescent"), f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"


@pytest.mark.parametrize("folder", ALLOWED)
def test_every_package_folder_ships(folder):
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for init in (ROOT / folder).rglob("__init__.py"):
        name = ".".join(("geodescent", *init.parent.relative_to(ROOT).parts))
        assert f'"{name}"' in text
