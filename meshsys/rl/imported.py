"""Functions of the user's own, by import path."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from meshsys.errors import ConfigError

__all__ = ["import_function", "missing_extra"]


def import_function(where: str, said: str, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """A function by `package.module:function` or `folder/file.py:function`, with keyword arguments.

    Args:
        said: option and value, for messages.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = where.rpartition(":")
    if not module or not name:
        raise ConfigError(f"{said} names no function; write python:package.module:function or python:file.py:function")
    try:
        found = getattr(_from_file(module) if module.endswith(".py") else importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"{said} cannot be imported: {type(error).__name__}: {error}; mend it") from error
    if not callable(found):
        raise ConfigError(f"{said} is not a function; write python:package.module:function")
    return partial(found, **options) if options else found


def missing_extra(said: str, package: str) -> ConfigError:
    """The error for a package that an extra brings."""
    return ConfigError(f"{said} needs the package {package}; install it by pip install 'meshsys[rl]'")


def _from_file(path: str) -> ModuleType:
    path = os.path.realpath(os.path.expanduser(path))
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # as the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # what it defines can be pickled then
    spec.loader.exec_module(module)
    return module
