"""The catalogue and endpoints over HTTP: what is refused, what is shown, what one project sees of another's."""

from __future__ import annotations

import json
from pathlib import Path

import asyncpg
import pytest

from controlplane.core.ids import Kind, new_id
from controlplane.resources.model.catalogue import Catalogue, EngineEntry, ModelEntry, parse
from controlplane.resources.model.plan import Plan, plan_of, workload
from tests.api.gateway.conftest import REVISION
from tests.api.test_route import INSERT

NAME = "smollm2-135m-instruct"
ENDPOINTS = "/v1/projects/ours/endpoints"
SHIPPED = Path("controlplane/resources/model/entries")


async def test_catalogue(member, operator) -> None:
    listed = (await member.get("/v1/models")).json()
    (model,) = [item for item in listed["items"] if item["name"] == NAME]
    assert (model["state"], model["engine"], model["license"]) == ("in_catalogue", "llama-cpp", "Apache-2.0")
    assert model["memory_bytes"] >= sum(part["bytes"] for part in model["memory"])
    assert "--served-model-id" in model["argv"]
    assert listed["problems"] == []
    assert (await member.get(f"/v1/models/{NAME}")).json()["name"] == NAME
    assert (await member.get("/v1/models/none")).json()["code"] == "model.not_found"
    assert (await member.post(f"/v1/models/{NAME}/import")).status_code in (403, 404)
    begun = await operator.post(f"/v1/models/{NAME}/import")
    assert (begun.status_code, begun.json()["state"]) == (202, "importing"), begun.text
    again = await operator.post(f"/v1/models/{NAME}/import")
    assert again.json()["id"] == begun.json()["id"]


async def test_validate(operator) -> None:
    text = (SHIPPED / f"models/{NAME}.yaml").read_text()
    good = await operator.post("/v1/models/validate", json={"yaml": text.replace(NAME, "mine")})
    assert (good.status_code, good.json()["name"], good.json()["id"]) == (200, "mine", None), good.text
    for wrong, words in (
        (text.replace("vcpus: 1", "vcpus: 0"), "shape/vcpus"),
        (text.replace("engine: llama-cpp", "engine: none"), "no engine none"),
        (text + "\nsurprise: 1\n", "surprise"),
        ("{", "not YAML"),
    ):
        answer = await operator.post("/v1/models/validate", json={"yaml": wrong})
        assert (answer.status_code, answer.json()["code"]) == (422, "model.entry_invalid")
        assert words in answer.json()["detail"]


async def test_endpoint_refusals(member, operator) -> None:
    body = {"name": "chat", "model": NAME}
    answer = await member.post(ENDPOINTS, json=body)
    assert (answer.status_code, answer.json()["code"]) == (409, "model.not_available")
    assert f"bedplate model import {NAME}" in answer.json()["detail"]
    for change in ({"replicas": -1}, {"isolation": "chroot"}, {"name": "Chat"}, {"route": "a b"}, {"gpu": 1}):
        assert (await member.post(ENDPOINTS, json={**body, **change})).json()["code"] == "request.invalid"
    assert (await member.get(f"{ENDPOINTS}/chat")).json()["code"] == "endpoint.not_found"
    assert (await member.get(ENDPOINTS)).json()["items"] == []


async def test_refusals_of_roll_outs(member, database_url) -> None:
    connection = await asyncpg.connect(database_url)
    endpoint_id = new_id(Kind.ENDPOINT)
    await connection.execute(INSERT, endpoint_id, "chat", json.dumps({"served_model_id": "m", "isolation": "vm"}), "ours")
    await connection.execute(REVISION, endpoint_id)
    await connection.close()
    chat = f"{ENDPOINTS}/chat"
    for change in (
        {"rollout": {"weight": 5}},  # of nothing
        {"vcpus": 2, "rollout": {"max_surge": 0}},
        {"vcpus": 2, "rollout": {"weight": 101}},
        {"vcpus": 2, "rollout": {"speed": 1}},
        {"vcpus": 0},
        {"memory_bytes": 1},
    ):
        answer = await member.patch(chat, json=change)
        assert (answer.status_code, answer.json()["code"]) == (422, "request.invalid"), answer.text
    for verb, code in (("promote", "endpoint.not_rolling_out"), ("rollback", "endpoint.no_earlier_revision")):
        answer = await member.post(f"{chat}/{verb}")
        assert (answer.status_code, answer.json()["code"]) == (409, code)
    answer = await member.patch(chat, json={"model": "none"})
    assert (answer.status_code, answer.json()["code"]) == (409, "model.not_available")
    (revision,) = (await member.get(f"{chat}/revisions")).json()["items"]
    assert (revision["number"], revision["failure"]) == (1, "")
    shown = (await member.get(chat)).json()
    assert (shown["revision"], shown["rollout"]) == (1, None)


def test_files_of_the_deployment_win_and_a_broken_one_hides_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    text = (SHIPPED / f"models/{NAME}.yaml").read_text()
    catalogue = Catalogue(SHIPPED, tmp_path)
    mine = tmp_path / "models/a.yaml"
    mine.write_text(text.replace("SmolLM2 135M Instruct\n", "Mine\n", 1).replace("title: SmolLM2 135M Instruct", "title: Mine"))
    assert catalogue.look().models[NAME].title == "Mine"
    (tmp_path / "models/b.yaml").write_text("name: 7\n")
    found = catalogue.look()
    assert found.models[NAME].title == "Mine"
    assert [Path(problem.path).name for problem in found.problems] == ["b.yaml"]
    mine.unlink()
    assert catalogue.look().models[NAME].title == "SmolLM2 135M Instruct"


def test_a_plan_survives_being_stored() -> None:
    found = Catalogue(SHIPPED).look()
    plan = Plan(model=found.models[NAME], engine=found.engines["llama-cpp"])
    again = plan_of({**plan.spec, "weights_image_id": "img_1", "isolation": "container"})
    assert again == plan
    assert again.digest == plan.digest
    body = workload(plan, vcpus=3, weights_image_id="img_1")
    assert body["argv"][body["argv"].index("--threads") + 1] == "3"
    assert body["mounts"] == [{"image_id": "img_1", "path": "/models"}]


def test_templates_name_known_words_only() -> None:
    text = (SHIPPED / "engines/llama-cpp.yaml").read_text()
    with pytest.raises(ValueError, match="names secret"):
        parse(text.replace("{port}", "{secret}"), EngineEntry)
    with pytest.raises(ValueError, match="Field required"):
        parse("name: x", ModelEntry)
