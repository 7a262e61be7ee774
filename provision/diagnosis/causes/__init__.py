"""The table of failure causes. Each file of this folder is a subject, and the file is its registration.

A file defines ``SUBJECT``, its heading in docs/troubleshooting.md; ``ORDER``, its position in the table; and
``CAUSES``, a row for each cause. Several files may have the same subject. The first row that matches a line wins, so
specific rows come before general ones.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from provision.diagnosis.cause import Cause

REQUIRED = {"SUBJECT": str, "ORDER": int, "CAUSES": tuple}


def _module(name: str) -> ModuleType:
    module = importlib.import_module(f"{__name__}.{name}")
    for wanted, kind in REQUIRED.items():
        if not isinstance(getattr(module, wanted, None), kind):
            raise ClusterctlError(f"{module.__file__} is not a file of failure causes: it does not define {wanted}")
    return module


def _subjects() -> dict[str, tuple[Cause, ...]]:
    modules = [_module(each.name) for each in pkgutil.iter_modules(__path__)]
    found: dict[str, tuple[Cause, ...]] = {}
    for module in sorted(modules, key=lambda module: (module.ORDER, module.__name__)):
        found[module.SUBJECT] = (*found.get(module.SUBJECT, ()), *module.CAUSES)
    return found


SUBJECTS: Mapping[str, tuple[Cause, ...]] = _subjects()
TABLE: tuple[Cause, ...] = tuple(cause for causes in SUBJECTS.values() for cause in causes)
