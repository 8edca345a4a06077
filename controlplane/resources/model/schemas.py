"""Bodies of the model routes."""

from __future__ import annotations

from pydantic import AwareDatetime, Field

from controlplane.api.schemas import Input, Progress, View


class ModelFileView(View):
    name: str = Field(description="The file.", examples=["model.gguf"])
    sha256: str = Field(description="SHA-256 of its bytes.", examples=["0" * 64])
    size_bytes: int = Field(description="Its size.", examples=[98362432])


class MemoryPartView(View):
    reason: str = Field(description="What for.", examples=["weights"])
    bytes: int = Field(description="How much.", examples=[98362432])


class ModelView(View):
    """A model of the catalogue, and whether it was imported."""

    id: str | None = Field(description="The id once it was imported.", examples=["mod_01jd2x4k3fe8v9m2q7t5w0y6za"])
    name: str = Field(description="The name in the catalogue.", examples=["smollm2-135m-instruct"])
    title: str = Field(description="For people.", examples=["SmolLM2 135M Instruct"])
    description: str = Field(description="For people.", examples=["A small chat model."])
    license: str = Field(description="The weights' licence (SPDX).", examples=["Apache-2.0"])
    features: list[str] = Field(description="`chat`, `completions`, `embeddings`.", examples=[["chat"]])
    context_tokens: int = Field(description="Most tokens of one request, prompt and answer.", examples=[2048])
    engine: str = Field(description="The engine that serves it.", examples=["llama-cpp"])
    isolations: list[str] = Field(description="What a replica can be: `vm`, `container`.", examples=[["container"]])
    files: list[ModelFileView] = Field(description="The weights.", examples=[[]])
    size_bytes: int = Field(description="Size of the weights.", examples=[98362432])
    vcpus: int = Field(description="Cores of a replica, unless the endpoint says otherwise.", examples=[1])
    memory: list[MemoryPartView] = Field(
        description="Memory of a replica, part by part; in the first of `isolations`.", examples=[[]]
    )
    memory_bytes: int = Field(description="The sum, rounded up.", examples=[603979776])
    argv: list[str] = Field(description="The command of a replica of the default shape.", examples=[["/usr/bin/serve"]])
    state: str = Field(description="`in_catalogue`, `importing` or `available`.", examples=["available"])
    progress: Progress | None = Field(description="What the import does just now.", examples=[None])
    fetched_bytes: int = Field(description="How much of the weights that have a URL has come.", examples=[0])
    failure: str | None = Field(description="Why the import stopped.", examples=[None])
    created_at: AwareDatetime | None = Field(description="When it was imported.", examples=["2026-11-30T12:00:00Z"])


class CatalogueProblem(View):
    path: str = Field(description="The file.", examples=["models/mine.yaml"])
    detail: str = Field(description="What is wrong with it.", examples=["files: Field required"])


class ModelList(View):
    items: list[ModelView] = Field(description="By name.", examples=[[]])
    next_page_token: str | None = Field(default=None, description="Always null.", examples=[None])
    problems: list[CatalogueProblem] = Field(description="Files of the catalogue that are not in force.", examples=[[]])


class ModelValidate(Input):
    """A catalogue entry to check."""

    yaml: str = Field(max_length=1 << 20, description="The entry as YAML.", examples=["name: mine\n"])
