"""Errors of models."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NotFound


class ModelNotFound(NotFound):
    """No such model in the catalogue; `bedplate model list` shows them."""

    code = "model.not_found"
    title = "No such model"


class ModelEntryInvalid(InvalidInput):
    """The catalogue entry does not fit the schema; the detail names every wrong field."""

    code = "model.entry_invalid"
    title = "The catalogue entry is not valid"


class ModelNotAvailable(Conflict):
    """The model was not imported, or is being imported still: `bedplate model import NAME`."""

    code = "model.not_available"
    title = "The model is not available yet"
