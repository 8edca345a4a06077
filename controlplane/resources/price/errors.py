"""Errors of prices."""

from __future__ import annotations

from controlplane.core.errors import Conflict, NotFound


class PriceNotFound(NotFound):
    """No such price; `bedplate price list` shows them."""

    code = "price.not_found"
    title = "No such price"


class PriceNameTaken(Conflict):
    """Another price has this name."""

    code = "price.name_taken"
    title = "The name is taken"
    constraint = "price_name_idx"


class PriceTimeTaken(Conflict):
    """Another price of the model begins at the same time."""

    code = "price.time_taken"
    title = "The model has a price from that time on"
    constraint = "price_model_valid_from_idx"
