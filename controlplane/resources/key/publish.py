"""Telling gateways that what they know has changed. The one rule: in the transaction of the change itself, and last in it:
the version's row is held until the commit.
"""

from __future__ import annotations

from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.gateway import GatewayVersion

CHANNEL = "bedplate_gateway"


async def publish(session: AsyncSession, topic: Literal["keys", "routes"]) -> int:
    """Raise the topic's version and notify; gateways have it within a second, usually within milliseconds. The new version."""
    await session.flush()
    raised = insert(GatewayVersion).values(topic=topic, version=1)
    raised = raised.on_conflict_do_update(index_elements=[GatewayVersion.topic], set_={"version": GatewayVersion.version + 1})
    version = await session.scalar(raised.returning(GatewayVersion.version))
    await session.execute(select(func.pg_notify(CHANNEL, topic)))
    assert version is not None
    return version
