"""Images (of guests, engines, model weights): the row, its files, the blobs they are made of, and where copies of them lie.

The one rule: an image is `available` exactly when every blob that its files name was stored and verified.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Stamped, Versioned

SHA256 = "~ '^[0-9a-f]{64}$'"


class Image(Versioned, Base):
    """One image of the deployment; `boot` is the manifest's boot section, `root_file` the file that disks start from.

    `purpose`: `guest` boots; `engine` (a workload's root) and `weights` (mounted read-only) belong to models of the catalogue.
    `runs_workloads`: a guest that keeps the workload of its seed running, so replicas can be VMs of it.
    """

    __tablename__ = "image"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    description: Mapped[str] = mapped_column(server_default="")
    purpose: Mapped[str] = mapped_column(server_default="guest")
    architecture: Mapped[str]
    os: Mapped[str] = mapped_column(server_default="")
    default_user: Mapped[str]
    boot: Mapped[dict[str, Json]]
    root_file: Mapped[str]
    min_disk_bytes: Mapped[int]
    min_memory_bytes: Mapped[int]
    runs_workloads: Mapped[bool] = mapped_column(server_default="false")
    state: Mapped[str] = mapped_column(server_default="uploading")
    available_at: Mapped[datetime | None]
    deleting_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("state IN ('uploading', 'available', 'deleting')", name="state_known"),
        CheckConstraint("(state = 'available') <= (available_at IS NOT NULL)", name="available_has_time"),
        CheckConstraint("(state = 'uploading') <= (available_at IS NULL)", name="uploading_is_not_available"),
        CheckConstraint("(state = 'deleting') = (deleting_at IS NOT NULL)", name="deleting_has_time"),
        CheckConstraint("architecture IN ('x86_64', 'aarch64')", name="architecture_known"),
        CheckConstraint("purpose IN ('guest', 'engine', 'weights')", name="purpose_known"),
        CheckConstraint("boot->>'kind' IN ('kernel', 'firmware', 'none')", name="boot_known"),
        CheckConstraint("(purpose = 'guest') = (boot->>'kind' <> 'none')", name="guests_boot"),
        CheckConstraint("runs_workloads <= (purpose = 'guest')", name="guests_run_workloads"),
        CheckConstraint("min_disk_bytes > 0 AND min_memory_bytes > 0", name="sizes_positive"),
    )


class ImageFile(Base):
    """One file of an image, by content. `url`: where the control plane fetches it; `fetched_bytes`: how much has come."""

    __tablename__ = "image_file"

    image_id: Mapped[str] = mapped_column(ForeignKey("image.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    sha256: Mapped[str]
    size_bytes: Mapped[int]
    url: Mapped[str | None]
    fetched_bytes: Mapped[int] = mapped_column(server_default="0")

    __table_args__ = (
        CheckConstraint(f"sha256 {SHA256}", name="sha256_form"),
        CheckConstraint("size_bytes >= 0 AND fetched_bytes >= 0", name="size_not_negative"),
        Index(None, "sha256"),
    )


class Blob(Base):
    """Content that lies, verified, in the control plane's image store under its digest. With `removing_at` its file is being
    removed: it counts as missing, and cannot be stored again before the row is gone.
    """

    __tablename__ = "blob"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    size_bytes: Mapped[int]
    stored_at: Mapped[datetime]
    removing_at: Mapped[datetime | None]

    __table_args__ = (CheckConstraint(f"sha256 {SHA256}", name="sha256_form"),)


class ImageCopy(Stamped, Base):
    """An image on a host. Its run is the only one that uploads this image there."""

    __tablename__ = "image_copy"

    id: Mapped[str] = mapped_column(primary_key=True)
    image_id: Mapped[str] = mapped_column(ForeignKey("image.id"))
    host_id: Mapped[str] = mapped_column(ForeignKey("host.id"))
    state: Mapped[str] = mapped_column(server_default="copying")
    present_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("state IN ('copying', 'present', 'purging')", name="state_known"),
        CheckConstraint("(state = 'present') <= (present_at IS NOT NULL)", name="present_has_time"),
        Index(None, "image_id", "host_id", unique=True),
        Index(None, "host_id"),
    )
