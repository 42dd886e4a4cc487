"""The API of the review page: what it tells, what it keeps, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import csda
from csda.data.decisions import read_decisions
from csda.review.advisor import Advisor
from csda.review.guards import allowed_hosts
from csda.review.server import create_app, guarded
from csda.review.session import Said, Session, align_by_history, open_folder, open_run
from csda.runs import Run

pytest.importorskip("fastapi", reason="the extra `review` is not installed")
from fastapi.testclient import TestClient

MARK = {"X-CSDA-Review": "1"}
HOST = "http://127.0.0.1:8765"


@dataclass
class Opened:
    session: Session
    client: TestClient

    def get(self, path: str, **parameters: Any) -> Any:
        answer = self.client.get(path, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def decide(self, images: list[int], action: str = "label", label: tuple[int, ...] = ()) -> Any:
        body = {"images": images, "action": action, "label": list(label)}
        answer = self.client.post("/api/decisions", json=body, headers=MARK)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def run_copy(tiny_run: Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_run.folder, tmp_path / "run"))


@pytest.fixture
def opened(run_copy: Path) -> Iterator[Opened]:
    session = open_run(run_copy, who="me")
    with TestClient(guarded(create_app(session, Advisor(session, Run(run_copy)))), base_url=HOST) as client:
        yield Opened(session, client)
    session.close()


def test_only_unlabeled_and_labeled_images_are_offered(opened: Opened, tiny_run: Run) -> None:
    counts = opened.get("/api/session")["counts"]
    parts = [row.split for row in tiny_run.split]
    assert counts == {"unlabeled": parts.count("unlabeled"), "given": parts.count("labeled")}
    seen = {
        opened.session.names[item["number"]]
        for name in ("unlabeled", "given")
        for item in opened.get("/api/images", list=name, limit=500)["items"]
    }
    assert seen == {row.id for row in tiny_run.split if row.split in ("labeled", "unlabeled")}
    for search in ("", "rare", ".png"):
        page = opened.get("/api/images", search=search, limit=500)
        assert page["matching"] == sum(search in item["name"] for item in opened.get("/api/images", limit=500)["items"])


def test_the_truth_is_neither_read_nor_told(run_copy: Path) -> None:
    """Its file may be missing, and no answer has the folder that is named after the class."""
    (run_copy / "truth.csv").unlink()
    session = open_run(run_copy)
    with TestClient(guarded(create_app(session)), base_url=HOST) as client:
        for item in client.get("/api/images", params={"limit": 500}).json()["items"]:
            assert "/" not in item["name"]
            assert item["given"] is None
            detailed = client.get(f"/api/images/{item['number']}").json()
            assert detailed["given"] is None
            assert session.records[item["number"]].label is None
    session.close()


def test_pages_follow_the_order_and_stay_where_they_are(opened: Opened) -> None:
    whole = [item["number"] for item in opened.get("/api/images", limit=500)["items"]]
    paged: list[int] = []
    after: int | None = -1
    while after is not None:
        page = opened.get("/api/images", limit=7, after=after, state="open")
        paged += [item["number"] for item in page["items"]]
        after = page["after"]
        opened.decide([page["items"][0]["number"]], "skip")  # what is decided moves nothing that comes later
    assert paged == whole


def test_uncertain_images_come_first_and_one_in_five_is_drawn(opened: Opened, tiny_run: Run) -> None:
    items = opened.get("/api/images", order="uncertainty", limit=500)["items"]
    assert [item["audit"] for item in items] == [place % 5 == 4 for place in range(len(items))]
    probs = tiny_run.pseudo_labels
    margins = [
        np.diff(sorted(probs[opened.session.names[item["number"]]])[-2:])[0] for item in items if not item["audit"]
    ]
    assert margins == sorted(margins)
    audited = {item["number"] for item in items if item["audit"]}
    for order in opened.get("/api/session")["orders"]["unlabeled"]:
        found = opened.get("/api/images", order=order, limit=500)["items"]
        assert {item["number"] for item in found if item["audit"]} == audited
        assert sorted(item["number"] for item in found) == sorted(item["number"] for item in items)


def test_filters(opened: Opened) -> None:
    items = opened.get("/api/images", limit=500)["items"]
    for position, name in enumerate(opened.session.classes):
        found = opened.get("/api/images", predicted=position, limit=500)
        assert found["matching"] == sum(item["predicted"] == name for item in items)
    middle = sorted(item["confidence"] for item in items)[len(items) // 2]
    assert opened.get("/api/images", low=middle)["matching"] == sum(item["confidence"] >= middle for item in items)
    assert opened.get("/api/images", high=middle)["matching"] == sum(item["confidence"] <= middle for item in items)


def test_probabilities_before_and_after_alignment(opened: Opened, tiny_run: Run) -> None:
    """Eq. (10) and (14) written out in NumPy, with the marginals of an epoch that has some."""
    number = opened.get("/api/images")["items"][0]["number"]
    told = opened.get(f"/api/images/{number}")["probs"]
    q = tiny_run.pseudo_labels[opened.session.names[number]]
    assert told == pytest.approx(q.tolist())
    run = Run(tiny_run.folder)
    run.__dict__["result"] = {"best_epoch": 3}
    i = int(q.argmax())
    labeled, unlabeled, temperatures = (
        run.history[name][2][i].astype(float) for name in ("labeled_marginals", "unlabeled_marginals", "temperatures")
    )
    tempered = labeled**temperatures
    expected = q * (tempered / tempered.sum()) / unlabeled
    aligned = align_by_history(run, np.stack([q, np.full(3, np.nan)]))
    assert aligned is not None
    assert aligned[0] == pytest.approx(expected / expected.sum(), abs=1e-6)
    assert np.isnan(aligned[1]).all()
    # An image that came with its label has a prediction by others, and no alignment.
    session = opened.session
    assert session.said is not None
    probs = np.where(np.isfinite(session.said.probs), session.said.probs, 1 / 3)
    session.tell(Said(probs, np.where(session.given[:, None], np.nan, probs)))
    given = int(np.flatnonzero(session.given)[0])
    assert opened.get(f"/api/images/{given}")["aligned"] is None
    assert opened.get(f"/api/images/{number}")["aligned"] == pytest.approx(probs[number].tolist())


def test_decisions_are_kept_undone_and_tallied(opened: Opened, run_copy: Path) -> None:
    first, second, third, *_ = (item["number"] for item in opened.get("/api/images")["items"])
    assert opened.decide([first], label=(2,))["items"][0]["label"] == "rare"
    opened.decide([first, second], label=(0,))
    opened.decide([third], "flag")
    summary = opened.get("/api/summary")
    assert {each["name"]: each["labeled"] for each in summary["classes"]} == {"common": 2, "label": 0, "rare": 0}
    assert summary["states"]["unlabeled"]["flagged"] == 1
    undone = opened.client.post("/api/undo", headers=MARK).json()
    assert [item["state"] for item in undone["items"]] == ["open"]
    undone = opened.client.post("/api/undo", headers=MARK).json()
    assert [(item["number"], item["label"]) for item in undone["items"]] == [(first, "rare"), (second, None)]
    assert opened.get("/api/changes", since=1)["last"] == 7
    kept = read_decisions(run_copy)
    assert [each.action for each in kept.decisions] == ["label", "label", "label", "flag", "undo", "undo", "undo"]
    assert kept.decisions[0].who == "me"
    assert kept.decisions[0].said in opened.session.classes
    again = open_run_elsewhere(run_copy)
    assert again == {opened.session.names[first]: "rare"}


def open_run_elsewhere(folder: Path) -> dict[str, str]:
    rows = csv.DictReader(io.StringIO((folder / "labels.csv").read_text()))
    taken_back: set[str] = set()
    lines = list(rows)
    taken_back = {row["undoes"] for row in lines if row["action"] == "undo"}
    return {row["image"]: row["label"] for row in lines if row["action"] == "label" and row["number"] not in taken_back}


def test_the_audit_counts_random_images_alone(opened: Opened) -> None:
    """Wilson's interval against statsmodels' values: 3 of 4 is 0.3006 to 0.9544."""
    items = opened.get("/api/images", limit=500)["items"]
    index = {name: position for position, name in enumerate(opened.session.classes)}
    audited = [item for item in items if item["audit"]][:4]
    for place, item in enumerate(audited):
        right = index[item["predicted"]]
        opened.decide([item["number"]], label=((right + (place == 0)) % 3,))
    for item in [item for item in items if not item["audit"]][:5]:
        opened.decide([item["number"]], label=((index[item["predicted"]] + 1) % 3,))
    audit = opened.get("/api/summary")["audit"]
    assert (audit["all"]["right"], audit["all"]["count"]) == (3, 4)
    assert audit["all"]["low"] == pytest.approx(0.3006, abs=1e-4)
    assert audit["all"]["high"] == pytest.approx(0.9544, abs=1e-4)
    assert sum(each["count"] for each in audit["classes"]) == 4


def test_pictures(opened: Opened) -> None:
    for path in ("thumbnail", "picture"):
        answer = opened.client.get(f"/api/images/0/{path}")
        assert answer.headers["content-type"] == "image/webp"
        with Image.open(io.BytesIO(answer.content)) as image:
            assert image.size == (32, 32)
    assert opened.client.get("/api/images/0/thumbnail").content == opened.client.get("/api/images/0/thumbnail").content


def test_what_the_model_says_of_an_image_that_is_sent(opened: Opened, tiny_run: Run, tiny_images: Path) -> None:
    """As `csda.load(run).predict` says it."""
    path = tiny_images / "rare" / "03.png"
    answer = opened.client.post("/api/predict", content=path.read_bytes(), headers=MARK)
    expected = csda.load(tiny_run.folder).predict(path)[0]
    assert answer.json()["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert answer.json()["predicted"] in tiny_run.classes
    assert opened.client.post("/api/predict", content=b"no image", headers=MARK).status_code == 415
    assert opened.client.post("/api/predict", content=b"", headers=MARK).status_code == 400


def test_where_the_network_looks(opened: Opened) -> None:
    answer = opened.client.get("/api/images/0/attention", params={"label": 2})
    with Image.open(io.BytesIO(answer.content)) as image:
        assert image.size == (32, 32)
        assert np.asarray(image).max() > 200  # the largest value of a map is 1
    assert opened.client.get("/api/images/0/attention", params={"label": 3}).status_code == 400


def test_a_window_on_sixteen_bits(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    values = np.arange(64 * 32, dtype=np.uint16).reshape(32, 64)
    Image.fromarray(values).save(tmp_path / "images" / "a.png")
    Image.new("RGB", (20, 10)).save(tmp_path / "images" / "b.png")
    session = open_folder(tmp_path / "images", tmp_path / "review", ["x", "y"])
    with TestClient(guarded(create_app(session)), base_url=HOST) as client:
        deep, plain = (client.get(f"/api/images/{number}").json() for number in (0, 1))
        assert deep["levels"] == deep["window"] == [0, 4095]  # twelve bits, as the picture is shown by default
        assert plain["levels"] is plain["window"] is None
        content = client.get("/api/images/0/picture", params={"low": 500, "high": 1000}).content
        shown = np.asarray(Image.open(io.BytesIO(content)).convert("L")).astype(float)
        expected = ((values.astype(float) - 500) / 500 * 255).clip(0, 255)
        assert shown.shape == (32, 64)
        assert np.abs(shown - expected).mean() < 4  # the picture is compressed
        assert client.get("/api/images/0/picture", params={"low": 5, "high": 5}).status_code == 400
    session.close()


def test_several_labels_an_image(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    names = [f"{number}.png" for number in range(6)]
    for name in names:
        Image.new("L", (40, 20), 90).save(folder / name)
    (folder / "labels.csv").write_text("image,label\n0.png,a|b\n1.png,(none)\n2.png,c\n")
    session = open_folder(folder, tmp_path / "review")
    with TestClient(guarded(create_app(session)), base_url=HOST) as client:
        opened = Opened(session, client)
        numbers = [item["number"] for item in opened.get("/api/images")["items"]]
        assert opened.decide([numbers[0]], label=(2, 0, 0))["items"][0]["label"] == "a|c"
        assert opened.decide([numbers[1]])["items"][0]["label"] == "(none)"
        tally = {each["name"]: (each["labeled"], each["given"]) for each in opened.get("/api/summary")["classes"]}
        assert tally == {"a": (1, 1), "b": (0, 1), "c": (1, 1)}
    session.close()


@pytest.mark.parametrize("trained", [True, False])
def test_features_are_there_when_their_orders_are(
    trained: bool, run_copy: Path, tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that asks between the features and what is learned from them is told that there are none yet."""
    session = open_run(run_copy) if trained else open_folder(tiny_images, tmp_path / "review")
    advisor = Advisor(session, Run(run_copy) if trained else None)
    with TestClient(guarded(create_app(session, advisor)), base_url=HOST) as client:
        told: list[Any] = []
        learn = Advisor.refresh

        def refresh(self: Advisor) -> int:
            told.append(client.get("/api/session").json())
            return learn(self)

        def read_features(dataset: Any, tell: Any) -> Any:
            names = [record.id.rpartition("/")[0] for record in dataset.records]
            centres = {name: 4 * np.eye(3, 8)[place] for place, name in enumerate(sorted(set(names)))}
            noise = np.random.default_rng(0).normal(size=(len(names), 8))
            return np.float32([centres[name] for name in names] + noise)

        monkeypatch.setattr("csda.review.learning.read_features", read_features)
        monkeypatch.setattr(Advisor, "refresh", refresh)
        advisor.prepare()
        told.append(client.get("/api/session").json())
        assert [each["has_features"] for each in told] == [False, True]
        assert [each["can_refresh"] for each in told] == [False, True]
        assert "suspicious" in told[1]["orders"]["given"]
        if trained:
            assert {"diversity", "mix", "disagreement"} <= set(told[1]["orders"]["unlabeled"])
            number = client.get("/api/images").json()["items"][0]["number"]
            near = client.get(f"/api/images/{number}").json()["neighbours"]
            assert len(near) == 6
            assert [each["similarity"] for each in near] == sorted((each["similarity"] for each in near), reverse=True)
    session.close()


# --- what is refused ------------------------------------------------------------------------------------------------


def _unchanged(opened: Opened) -> None:
    assert opened.session.log.path.read_text().count("\n") == 1


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example:8765", "", "[::2]:8765"])
def test_another_host_is_refused(opened: Opened, host: str) -> None:
    for path in ("/", "/api/session", "/static/app.js", "/api/images/0/thumbnail"):
        assert opened.client.get(path, headers={"Host": host}).status_code == 421
    assert opened.client.get("/", headers={"Host": "localhost:1234"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://evil.example", **MARK},
        {"Origin": "null", **MARK},
        {"Origin": "http://127.0.0.1:9999", **MARK},
        {"Origin": "https://127.0.0.1:8765", **MARK},
        {"Sec-Fetch-Site": "cross-site", **MARK},
        {"Sec-Fetch-Site": "same-site", **MARK},
        {"Content-Type": "text/plain"},
    ],
)
def test_a_page_of_another_site_changes_nothing(opened: Opened, headers: dict[str, str]) -> None:
    content = json.dumps({"images": [0], "action": "flag"})
    for path in ("/api/decisions", "/api/undo", "/api/refresh", "/api/predict"):
        answer = opened.client.post(path, content=content, headers={"Content-Type": "application/json", **headers})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
    preflight = opened.client.options(
        "/api/decisions", headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status_code == 403
    _unchanged(opened)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static/%252e%252e%252fserver.py",
        "/static/..%5cserver.py",
        "/static//etc/passwd",
        "/static/%00",
        "/static/index.html",
        "/api/images/../../etc/passwd",
        "/api/images/%2e%2e%2f%2e%2e%2fetc%2fpasswd/picture",
        "/api/images/-1",
        "/api/images/1e3/thumbnail",
        "/api/images/999999/thumbnail",
        "/api/images/99999999999999999999999/picture",
        "/api/images?limit=501",
        "/api/images?limit=0",
        "/api/images?after=99999999999999",
        "/api/images?order=__class__",
        "/api/images?predicted=3",
        "/api/images?low=nan",
        "/api/images?list=test",
        "/api/images?list=val",
        "/api/changes?since=-1",
        "/docs",
        "/labels.csv",
    ],
)
def test_what_there_is_not(opened: Opened, path: str) -> None:
    answer = opened.client.get(path)
    assert 400 <= answer.status_code < 500, answer.text
    assert b"import" not in answer.content
    _unchanged(opened)


@pytest.mark.parametrize(
    "body",
    [
        {"images": [], "action": "label", "label": [0]},
        {"images": [10**6], "action": "label", "label": [0]},
        {"images": [0], "action": "label", "label": []},
        {"images": [0], "action": "label", "label": [3]},
        {"images": [0], "action": "label", "label": [0, 1]},
        {"images": [0], "action": "undo"},
        {"images": [0, 1], "action": "label", "labels": [[0]]},
        {"images": [0], "action": "label", "labels": [[3]]},
        {"images": [0], "action": "label", "label": [0], "labels": [[0]]},
        {"images": [0], "action": "skip", "labels": [[0]]},
        {"images": [0], "action": "flag", "label": [1]},
        {"images": list(range(501)), "action": "skip"},
        {"images": [0.5], "action": "skip"},
        {"images": ["../x"], "action": "skip"},
        {"images": [0], "action": "skip", "who": "somebody else"},
        [],
        "x",
    ],
)
def test_decisions_that_make_no_sense(opened: Opened, body: Any) -> None:
    answer = opened.client.post("/api/decisions", json=body, headers=MARK)
    assert answer.status_code in (400, 404, 422)
    _unchanged(opened)


def test_a_huge_request_is_cut_off(opened: Opened) -> None:
    answer = opened.client.post("/api/predict", content=b"", headers={**MARK, "Content-Length": str(10**12)})
    assert answer.status_code == 413
    _unchanged(opened)


def test_beyond_this_machine_a_token_is_asked_for(opened: Opened) -> None:
    app = guarded(create_app(opened.session), "192.0.2.7", token="secret")
    base = "http://192.0.2.7:8765"
    with TestClient(app, base_url=base) as client:
        for path in ("/", "/?token=wrong", "/?token=", "/?token=secret&token=secret", "/static/app.js", "/api/session"):
            assert client.get(path).status_code == 401
        assert client.get("/api/session?token=secret").status_code == 401  # in the page's address alone
        assert client.post("/api/undo", headers={**MARK, "Authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/api/session", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert client.get("/?token=secret", headers={"Host": "evil.example"}).status_code == 421
        page = client.get("/?token=secret")
        assert page.status_code == 200
        assert {"HttpOnly", "SameSite=Strict"} <= set(page.headers["set-cookie"].split("; "))
        assert client.get("/api/session").status_code == 200  # by the cookie
    assert "0.0.0.0" not in allowed_hosts("0.0.0.0")
    assert "evil.example" not in allowed_hosts("0.0.0.0")


def test_the_policy_allows_nothing_from_elsewhere(opened: Opened) -> None:
    for path in ("/", "/static/app.js", "/api/session", "/nowhere"):
        headers = opened.client.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    for name in ("index.html", "app.js", "api.js", "panels.js", "viewer.js", "review.css", "report.css"):
        text = opened.client.get("/" if name == "index.html" else f"/static/{name}").text
        assert "//" not in text.replace("// ", "") or "http" not in text, name
        assert "innerHTML" not in text, name


def test_a_link_that_was_put_there_later_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(folder / name)
    secret = tmp_path / "secret.png"
    Image.new("RGB", (8, 8), "red").save(secret)
    session = open_folder(folder, tmp_path / "review", ["x", "y"])
    (folder / "a.png").unlink()
    (folder / "a.png").symlink_to(secret)
    (folder / "b.png").unlink()
    with TestClient(guarded(create_app(session)), base_url=HOST) as client:
        for number in (0, 1):
            for path in ("thumbnail", "picture"):
                assert client.get(f"/api/images/{number}/{path}").status_code == 404
            assert client.get(f"/api/images/{number}").status_code == 404
    session.close()


def test_names_are_data(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    name = "<img src=x onerror=alert(1)>.png"
    Image.new("RGB", (8, 8)).save(folder / name)
    session = open_folder(folder, tmp_path / "review", ["<script>alert(1)</script>", "=cmd"])
    with TestClient(guarded(create_app(session)), base_url=HOST) as client:
        opened = Opened(session, client)
        assert opened.get("/api/images")["items"][0]["name"] == name
        opened.decide([0], label=(0,))
        assert client.get("/api/session").headers["content-type"] == "application/json"
    session.close()
    assert read_decisions(tmp_path / "review").tally() == {"<script>alert(1)</script>": 1}


def test_the_schema_says_what_happens(opened: Opened) -> None:
    """Drawn requests, from the schema that the server gives of itself: no answer is a 5xx or another than it says."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from schemathesis.checks import not_a_server_error, response_schema_conformance, status_code_conformance

    schema = schemathesis.openapi.from_asgi("/api/openapi.json", opened.client.app, headers={"Host": "127.0.0.1"})
    checks = [not_a_server_error, status_code_conformance, response_schema_conformance]
    seen: Counter[tuple[str, int]] = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=10, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            answer = case.call_and_validate(headers={**MARK, "Host": "127.0.0.1"}, checks=checks)
            seen[case.operation.path, answer.status_code] += 1

        ask()
    reached = {path for path, status in seen if status == 200}
    assert {"/api/images", "/api/session", "/api/summary", "/api/undo", "/api/decisions"} <= reached
