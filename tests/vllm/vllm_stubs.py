"""Importing a few of vLLM's real modules without its compiled extensions: everything else of vLLM is a stub.

A stub module has any attribute. What it gives can be a base class, a decorator, a context manager, an annotation or a
falsy value, but computes nothing.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class Thing:
    """Falsy, empty, callable, enterable; called with one function it is a decorator."""

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and (inspect.isroutine(args[0]) or inspect.isclass(args[0])) else Thing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Thing()

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Thing:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getitem__(self, _: Any) -> Any:
        return Thing()

    def __or__(self, _: Any) -> Any:
        return Any

    __ror__ = __or__


class Stub(ABCMeta):
    """The metaclass of what a stub module gives."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return Thing()(*args, **kwargs) if "_raw" in cls.__dict__ else super().__call__(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or "_raw" not in cls.__dict__:
            raise AttributeError(name)
        return Thing()

    def __bool__(cls) -> bool:
        return "_raw" not in cls.__dict__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *_: object) -> None: ...

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return Any

    __ror__ = __or__


class StubModule(ModuleType):
    """A module with any attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Stub(name, (), {"_raw": True})
        setattr(self, name, value)
        return value


class Release(MetaPathFinder, Loader):
    """Serves `vllm.*`: the named modules from their files, the rest as stubs."""

    def __init__(self, package: Path, real: Sequence[str], also: Sequence[str] = ()) -> None:
        self.package, self.real, self.also = package, set(real), set(also)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top != "vllm" and top not in self.also:
            return None
        if fullname in self.real:
            file = self.package.parent / fullname.replace(".", "/")
            if file.is_dir():
                return importlib.util.spec_from_file_location(
                    fullname, file / "__init__.py", submodule_search_locations=[str(file)]
                )
            return importlib.util.spec_from_file_location(fullname, file.with_suffix(".py"))
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def release(package: Path, real: Sequence[str], also: Sequence[str] = ()) -> Iterator[None]:
    """`import vllm...` means this release, until the block ends."""

    def ours() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in {"vllm", *also}]

    before = {name: sys.modules.pop(name) for name in ours()}
    finder = Release(package, real, also)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)
