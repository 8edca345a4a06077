"""What the API takes and shows of images. The manifest is also what `provisioning/images` writes as `manifest.json`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from controlplane.api.schemas import Input, Name, Resource, View

MIB = 1 << 20
MAX_FILES = 32
MAX_FILE_BYTES = 1 << 40

FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/@]+/\S*$", max_length=2048)]
UserName = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")]


class ImageFileSpec(Input):
    """One file of an image, by content."""

    name: FileName = Field(description="Its name in the image; no directories.", examples=["root.qcow2"])
    sha256: Sha256 = Field(description="SHA-256 of its bytes, lower-case hex.", examples=["0" * 64])
    size_bytes: int = Field(ge=0, le=MAX_FILE_BYTES, description="Its size.", examples=[367001600])
    url: Url | None = Field(
        default=None,
        description="Where the control plane fetches it (http or https); without, it is uploaded.",
        examples=["https://images.example.org/debian-12/root.qcow2"],
    )


class KernelBootSpec(Input):
    """The VMM loads a kernel from the image's files."""

    kind: Literal["kernel"] = Field(description="Boot by kernel.", examples=["kernel"])
    kernel_file: FileName = Field(description="The kernel.", examples=["vmlinuz"])
    initramfs_file: FileName = Field(description="The initial RAM file system.", examples=["initramfs"])
    cmdline: str = Field(max_length=2048, description="The kernel's command line.", examples=["root=/dev/vda rw console=ttyS0"])


class FirmwareBootSpec(Input):
    """The VMM loads a firmware, which boots from the disk."""

    kind: Literal["firmware"] = Field(description="Boot by firmware.", examples=["firmware"])
    firmware_file: FileName = Field(description="The firmware.", examples=["CLOUDHV.fd"])


class ImageManifest(Input):
    """What an image is and which files it has."""

    format: Literal[1] = Field(default=1, description="Version of the manifest's form.", examples=[1])
    name: Name
    description: str = Field(default="", max_length=1000, description="For people.", examples=["Debian 12, small"])
    architecture: Literal["x86_64", "aarch64"] = Field(description="The processor it runs on.", examples=["x86_64"])
    os: str = Field(default="", max_length=100, description="Operating system and version.", examples=["debian 12"])
    default_user: UserName = Field(default="debian", description="The user of VMs that name none.", examples=["debian"])
    boot: KernelBootSpec | FirmwareBootSpec = Field(
        description="How it boots.", examples=[{"kind": "firmware", "firmware_file": "CLOUDHV.fd"}]
    )
    root_file: FileName = Field(description="The file that root disks start from, raw or qcow2.", examples=["root.qcow2"])
    min_disk_bytes: int = Field(
        ge=MIB, le=1 << 46, multiple_of=512, description="The least size of a root disk.", examples=[2147483648]
    )
    min_memory_bytes: int = Field(
        default=64 * MIB, ge=16 * MIB, le=1 << 40, description="The least memory it boots with.", examples=[268435456]
    )
    runs_workloads: bool = Field(
        default=False,
        description="Whether the guest keeps the workload of its seed running: replicas can be VMs of it.",
        examples=[True],
    )
    files: list[ImageFileSpec] = Field(
        min_length=1,
        max_length=MAX_FILES,
        description="Every file of the image.",
        examples=[[{"name": "root.qcow2", "sha256": "0" * 64, "size_bytes": 1}]],
    )

    @model_validator(mode="after")
    def _files_are_whole(self) -> Self:
        names = [file.name for file in self.files]
        if len(set(names)) != len(names):
            raise ValueError("two files have the same name")
        boot = self.boot
        needed = [boot.kernel_file, boot.initramfs_file] if isinstance(boot, KernelBootSpec) else [boot.firmware_file]
        missing = [name for name in (self.root_file, *needed) if name not in names]
        if missing:
            raise ValueError(f"files does not list {', '.join(missing)}")
        sizes: dict[str, int] = {}
        for file in self.files:
            if sizes.setdefault(file.sha256, file.size_bytes) != file.size_bytes:
                raise ValueError(f"two sizes are given for {file.sha256}")
        return self


class DirectorySource(Input):
    """A directory on the machine of the API process, holding `manifest.json` and the files it names."""

    directory: str = Field(
        max_length=4096,
        pattern="^/",
        description="Absolute path. For operators, and only where the API listens on loopback.",
        examples=["/var/cache/bedplate/images/debian-12"],
    )


class ImageCreate(Input):
    """A new image: either a manifest, whose files are uploaded next, or a directory of the server. Exactly one of them."""

    manifest: ImageManifest | None = Field(default=None, description="What the image is.", examples=[None])
    source: DirectorySource | None = Field(default=None, description="Where the files lie already.", examples=[None])
    name: Name | None = Field(default=None, description="Use this name instead of the manifest's.", examples=["debian-12"])

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.manifest is None) == (self.source is None):
            raise ValueError("give either manifest or source")
        return self


class ImageFileView(View):
    """One file of an image."""

    name: str = Field(description="Its name in the image.", examples=["root.qcow2"])
    sha256: str = Field(description="SHA-256 of its bytes.", examples=["0" * 64])
    size_bytes: int = Field(description="Its size.", examples=[367001600])
    is_stored: bool = Field(description="Whether the control plane has it.", examples=[True])
    url: str | None = Field(description="Where it is fetched from; null: it is uploaded.", examples=[None])
    fetched_bytes: int = Field(description="How much of it has come from there.", examples=[120586240])


class ImageView(Resource):
    """A guest image."""

    description: str = Field(description="For people.", examples=["Debian 12, small"])
    architecture: str = Field(description="The processor it runs on.", examples=["x86_64"])
    os: str = Field(description="Operating system and version.", examples=["debian 12"])
    default_user: str = Field(description="The user of VMs that name none.", examples=["debian"])
    boot: dict[str, str] = Field(description="How it boots.", examples=[{"kind": "firmware", "firmware_file": "CLOUDHV.fd"}])
    root_file: str = Field(description="The file that root disks start from.", examples=["root.qcow2"])
    min_disk_bytes: int = Field(description="The least size of a root disk.", examples=[2147483648])
    min_memory_bytes: int = Field(description="The least memory it boots with.", examples=[268435456])
    runs_workloads: bool = Field(description="Whether replicas of endpoints can be VMs of it.", examples=[True])
    state: str = Field(description="`uploading`, `available` or `deleting`.", examples=["available"])
    failure: str | None = Field(description="Why fetching it has stopped for good.", examples=[None])
    last_error: str | None = Field(description="What fetching it is just tried again for.", examples=[None])
    files: list[ImageFileView] = Field(description="Its files.", examples=[[]])
    hosts: int = Field(description="On how many hosts a whole copy lies.", examples=[2])


class BlobView(View):
    """A file that was stored."""

    sha256: str = Field(description="SHA-256 of its bytes.", examples=["0" * 64])
    size_bytes: int = Field(description="Its size.", examples=[367001600])
    image_state: str = Field(description="The image's state now.", examples=["available"])
