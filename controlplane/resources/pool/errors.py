"""What can go wrong with pools."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NotFound


class PoolNotFound(NotFound):
    """There is no pool with this name or id."""

    code = "pool.not_found"
    title = "No such pool"


class PoolNameTaken(Conflict):
    """There is a pool of this name already."""

    code = "pool.name_taken"
    title = "The name is taken"
    constraint = "pool_name_key"


class PoolCidrTaken(Conflict):
    """The prefix overlaps another pool, or the private addresses of this deployment."""

    code = "pool.cidr_taken"
    title = "The prefix is in use"
    constraint = "pool_cidr_excl"


class PoolExclusionOutside(InvalidInput):
    """What is to be excluded does not lie inside the pool's prefix."""

    code = "pool.exclusion_outside"
    title = "The exclusion lies outside the pool"


class PoolInUse(Conflict):
    """Projects have reserved addresses of the pool; they must release them first."""

    code = "pool.in_use"
    title = "The pool is in use"
