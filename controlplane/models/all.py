"""Imports every model module, so that `Base.metadata` knows every table."""

from __future__ import annotations

import importlib
import pkgutil

from controlplane import models
from controlplane.models.base import Base

for _module in pkgutil.iter_modules(models.__path__):
    importlib.import_module(f"controlplane.models.{_module.name}")

metadata = Base.metadata
