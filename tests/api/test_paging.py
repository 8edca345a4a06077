"""Lists by keyset: complete and stable while rows come and go, and strict about what they are asked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from controlplane.core.ids import Kind, new_id
from controlplane.models.project import Project


async def names(client, **params):
    """Every name of all pages, and the page sizes."""
    found, sizes, token = [], [], None
    while True:
        query = dict(params) if token is None else {**params, "page_token": token}
        answer = await client.get("/v1/projects", params=query)
        assert answer.status_code == 200, answer.text
        items = answer.json()["items"]
        found += [item["name"] for item in items]
        sizes.append(len(items))
        token = answer.json()["next_page_token"]
        if token is None:
            return found, sizes


@pytest.fixture
async def many(operator, database):
    """Two projects and 23 more, each with a time of its own."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        Project(
            id=new_id(Kind.PROJECT),
            name=f"p{number:02}",
            labels={"parity": "even" if number % 2 == 0 else "odd"},
            created_at=start + timedelta(seconds=number // 3),
        )
        for number in range(23)
    ]
    async with database.session() as session:
        session.add_all(rows)
    return operator


@pytest.mark.parametrize("sort", ["name", "-name", "created_at", "-created_at", "id", "-id", "generation"])
async def test_pages_are_complete_and_in_order(many, sort):
    found, sizes = await names(many, sort=sort, limit=7)
    assert len(found) == len(set(found)) == 25
    assert sizes == [7, 7, 7, 4]
    if sort.endswith("name"):
        assert found == sorted(found, reverse=sort.startswith("-"))


async def test_rows_that_come_and_go_move_no_other(many):
    first = (await many.get("/v1/projects", params={"sort": "name", "limit": 10})).json()
    await many.delete("/v1/projects/p00")
    await many.post("/v1/projects", json={"name": "aaa"})
    await many.post("/v1/projects", json={"name": "zzz"})
    rest, _ = await names(many, sort="name", limit=10, page_token=first["next_page_token"]), None
    seen = [item["name"] for item in first["items"]] + rest[0]
    assert len(seen) == len(set(seen))
    assert {f"p{number:02}" for number in range(23)} <= set(seen)
    assert "zzz" in seen
    assert "aaa" not in seen


async def test_exactly_full_page_is_the_last(many):
    answer = (await many.get("/v1/projects", params={"limit": 25})).json()
    assert len(answer["items"]) == 25
    assert answer["next_page_token"] is None


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["name=p03"], {"p03"}),
        (["name~p2"], {"p20", "p21", "p22"}),
        (["name~p2", "labels.parity=odd"], {"p21"}),
        (["name~P0", "labels.parity!=even"], {"p01", "p03", "p05", "p07", "p09"}),
        (["name~%"], set()),
        (["name="], set()),
    ],
)
async def test_filters(many, filters, expected):
    found, _ = await names(many, filter=filters)
    assert set(found) == expected


@pytest.mark.parametrize(
    ("params", "status", "code"),
    [
        ({"limit": 0}, 422, "request.invalid"),
        ({"limit": 1001}, 422, "request.invalid"),
        ({"limit": "ten"}, 422, "request.invalid"),
        ({"sort": "color"}, 422, "request.invalid"),
        ({"sort": ""}, 422, "request.invalid"),
        ({"sort": "labels"}, 422, "request.invalid"),
        ({"filter": "name"}, 422, "request.invalid"),
        ({"filter": "color=red"}, 422, "request.invalid"),
        ({"filter": "generation=many"}, 422, "request.invalid"),
        ({"filter": "created_at=yesterday"}, 422, "request.invalid"),
        ({"filter": "generation=99999999999999999999"}, 422, "request.invalid"),
        ({"filter": "generation~1"}, 422, "request.invalid"),
        ({"filter": "name=a\u0000"}, 422, "request.invalid"),
        ({"colour": "red"}, 422, "request.invalid"),
        ({"page_token": "nonsense"}, 400, "page.token_invalid"),
        ({"page_token": "WzEsIm5hbWUiLCJhIiwiYiJd"}, 400, "page.token_invalid"),
        ({"page_token": "%%%"}, 400, "page.token_invalid"),
    ],
)
async def test_bad_questions(operator, params, status, code):
    answer = await operator.get("/v1/projects", params=params)
    assert answer.status_code == status, answer.text
    assert answer.json()["code"] == code
    if status == 422:
        assert answer.json()["errors"][0]["source"] == "query"


async def test_a_token_of_another_sort_is_refused(many):
    token = (await many.get("/v1/projects", params={"limit": 2, "sort": "name"})).json()["next_page_token"]
    answer = await many.get("/v1/projects", params={"limit": 2, "sort": "-name", "page_token": token})
    assert answer.json()["code"] == "page.token_invalid"
