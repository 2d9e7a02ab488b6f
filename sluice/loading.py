"""Finds and constructs objects that settings name as ``module:Attr`` or ``path/to/file.py:Attr``, such as a user's class.

The processes of an environment load this module each time one starts, so it imports no settings.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from sluice.errors import ConfigError
from sluice.models import importable

STARTED_BY = "STARTED_BY_SLUICE"
"""Environment variable of the processes of environments, and of all processes that these start."""

_SHORTEST_SECRET = 4
"""Characters of the shortest secret. Shorter texts are not treated as secrets: replacing them would garble a message."""


class ScriptEndedError(BaseException):
    """Raised at the call that would start a run, in a script that is loaded only for its definitions. The rest is not executed."""


def check_there(location: str, what: str) -> None:
    """Check that the package of ``module:Attr``, or file and attribute of ``path.py:Attr``, exist. Nothing is imported.

    Raises:
        ConfigError: if they do not exist.
    """
    module, attribute = _parts(location, what)
    if module.endswith(".py"):
        _check_defines(module, attribute, what)
        return
    if not importable(module):
        raise ConfigError(
            f"cannot find {what} {module}: there is no such module; install its package, or correct the name"
        )


def _check_defines(file: str, attribute: str, what: str) -> None:
    """Refuse a file that is not Python, or that never binds `attribute`. Accept a file that may bind names dynamically.

    Raises:
        ConfigError: with the line at fault, or the names that the file defines.
    """
    import ast  # noqa: PLC0415 - only this check needs it

    path = _existing(Path(file), what)
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise _no_python(path, what, error) from error
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name)
    if attribute in names or names & {"*", "__getattr__", "globals", "exec", "setattr", "vars"}:
        return
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    own = [each.name for each in tree.body if isinstance(each, kinds) and not each.name.startswith("_")]
    raise ConfigError(f"{file} has no {attribute!r}; it defines {', '.join(own) or 'nothing'}")


def _no_python(path: Path, what: str, error: Exception) -> ConfigError:
    place = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) else path
    return ConfigError(f"cannot import {what} {place}: {getattr(error, 'msg', error)}; correct the file")


def construct(location: str, what: str, arguments: Mapping[str, Any], setting: str, name: str = "") -> Any:  # noqa: ANN401 - whatever the user names
    """Call the class or function that ``module:Attr`` or ``path.py:Attr`` names.

    Args:
        location: Where the class or function is.
        what: What it makes, for messages.
        arguments: Keyword arguments.
        setting: The setting that holds the arguments.
        name: Name in the settings, if it differs from the location.

    Raises:
        ConfigError: if it cannot be found, or refuses the arguments.
    """
    make = load_attribute(location, what)
    try:
        return make(**arguments)
    except (TypeError, ValueError, OSError) as error:
        names = ", ".join(arguments) or "none"
        raise ConfigError(
            f"{what} {name or location} refuses its {setting} ({names}): {without_values(str(error), arguments)}"
        ) from error


def load_attribute(location: str, what: str) -> Any:  # noqa: ANN401 - whatever the user names
    """Return the attribute that ``module:Attr`` or ``path.py:Attr`` names.

    Raises:
        ConfigError: if there is no such module or attribute.
    """
    module_name, attribute = _parts(location, what)
    module = _from_file(Path(module_name), what) if module_name.endswith(".py") else _from_name(module_name, what)
    found = getattr(module, attribute, None)
    if found is None:
        own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
        kept = [value for value in own if inspect.isclass(value) or inspect.isfunction(value)]
        names = [value.__name__ for value in kept if not value.__name__.startswith("_")]
        raise ConfigError(f"{module_name} has no {attribute!r}; it defines {', '.join(names) or 'nothing'}")
    return found


def without_values(text: str, arguments: object) -> str:
    """Return a text with the texts in `arguments` replaced: API keys of judges must not be printed."""
    match arguments:
        case str() if len(arguments) >= _SHORTEST_SECRET:
            return text.replace(arguments, "***")
        case Mapping():
            inner: Iterable[object] = arguments.values()
        case list() | tuple():
            inner = arguments
        case _:
            return text
    for each in inner:
        text = without_values(text, each)
    return text


def _parts(location: str, what: str) -> tuple[str, str]:
    module, separator, attribute = location.rpartition(":")
    if not separator:
        raise ConfigError(
            f"{what} {location!r} is neither installed nor of the form module:Attr or path/to/file.py:Attr"
        )
    return module, attribute


def _from_name(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot import {what} {name}: {error}; is its package installed?") from error


def _from_file(path: Path, what: str) -> ModuleType:
    """Import a file under a module name made of its path. It can import the files next to it."""
    path = _existing(path, what)
    name = f"sluice_user_{path.parent.name}_{path.stem}".replace("-", "_").replace(".", "_")
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ScriptEndedError:
        pass
    except ImportError as error:
        del sys.modules[name]
        raise ConfigError(f"cannot import {what} {path}: {error}") from error
    except SyntaxError as error:  # of this file, or of one that it imports
        del sys.modules[name]
        raise _no_python(Path(error.filename or path), what, error) from error
    return module


def _existing(path: Path, what: str) -> Path:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"there is no {what} file {path} (relative paths start at {Path.cwd()})")
    return path
