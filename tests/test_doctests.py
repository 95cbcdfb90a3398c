"""The examples in the docstrings run. (pytest --doctest-modules cannot import the mapped folders.)"""

import doctest
import importlib
import inspect
import pkgutil

import pytest

PACKAGES = ["manifolds", "optim", "attention", "analysis", "experiments", "benchmarks"]
MODULES = [
    module.name
    for package in PACKAGES
    for module in pkgutil.walk_packages(
        importlib.import_module(f"geodescent.{package}").__path__, f"geodescent.{package}."
    )
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.parametrize("package", ["manifolds", "optim", "attention", "analysis"])
def test_every_public_function_has_an_example(package):
    module = importlib.import_module(f"geodescent.{package}")
    functions = [getattr(module, name) for name in module.__all__ if inspect.isfunction(getattr(module, name))]
    assert [f.__name__ for f in functions if not doctest.DocTestParser().get_examples(f.__doc__ or "")] == []
