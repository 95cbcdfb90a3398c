"""The examples in the docstrings run. (pytest --doctest-modules cannot import the mapped folders.)"""

import doctest
import importlib
import pkgutil

import pytest

PACKAGES = ["manifolds", "optim", "attention", "analysis", "experiments"]
MODULES = [
    module.name
    for package in PACKAGES
    for module in pkgutil.walk_packages(
        importlib.import_module(f"geodescent.{package}").__path__, f"geodescent.{package}."
    )
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) >= 2
