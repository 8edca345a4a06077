"""From rows to the documents a host is told. The one rule: the same generation always gives the same document."""

from __future__ import annotations

from typing import Literal, cast

from controlplane.models.host import Host
from controlplane.models.image import Image
from controlplane.models.project_key import ProjectKey
from controlplane.models.volume import Volume
from hostagent.protocol.wanted import EncryptionWanted, Generation, KekWanted, QosWanted, VolumeWanted

Backend = Literal["qsd", "spdk", "fake"]


def kek_of(key: ProjectKey) -> KekWanted:
    return KekWanted(id=key.id, public_key=key.public_key)


def volume_document(volume: Volume, image: Image | None, key: ProjectKey, *, epoch: int) -> VolumeWanted:
    return VolumeWanted(
        id=volume.id,
        generation=Generation(epoch=epoch, number=volume.generation),
        size_bytes=volume.size_bytes,
        image_id=image.id if image else "",
        image_file=image.root_file if image else "",
        snapshot_id=volume.snapshot_id or "",
        backend=cast("Backend", volume.backend),
        pool="" if volume.pool == "primary" else volume.pool,
        encryption=EncryptionWanted(unlock="control_plane" if volume.unlock == "control_plane" else "host", kek=kek_of(key)),
        qos=QosWanted(
            iops=volume.iops,
            bytes_per_second=volume.bytes_per_second,
            burst_iops=volume.burst_iops,
            burst_bytes_per_second=volume.burst_bytes_per_second,
            burst_seconds=volume.burst_seconds,
        ),
        num_queues=volume.num_queues,
        queue_size=volume.queue_size,
    )


def backend_of(host: Host) -> Backend:
    """The storage driver of new volumes on this host: `qsd` wherever there is one."""
    found = (host.facts or {}).get("storage_drivers")
    return "fake" if isinstance(found, list) and found == ["fake"] else "qsd"
