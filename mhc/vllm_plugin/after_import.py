"""Calling a function on a module as soon as it is imported, whenever that is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Finds nothing itself: takes the spec of the finders behind it and adds the action to its loader."""

    def __init__(self, actions: dict[str, Action]) -> None:
        self.actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.actions:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Then(spec.loader, self.actions[fullname])
                return spec
        return None


class _Then(Loader):
    def __init__(self, loader: Any, action: Action) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._action(module)


def after_import(names: Sequence[str], action: Action) -> None:
    """Call `action(module)` after each named module's first import, at once for those already imported.

    Names that a call has arranged before are left as they are.
    """
    known = {name for finder in sys.meta_path if isinstance(finder, _Finder) for name in finder.actions}
    new = [name for name in names if name not in known]
    if not new:
        return
    sys.meta_path.insert(0, _Finder(dict.fromkeys(new, action)))
    for name in new:
        if name in sys.modules:
            action(sys.modules[name])
