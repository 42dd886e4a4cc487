"""The API of the review page, and its server.

Images are identified by their number in the session, never by a path. The page and its scripts are read once, from the
package. Nothing is requested from any other host.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from csda.data.decode import unremarked
from csda.errors import ConfigError, CsdaError, DataError, RunError
from csda.review import ordering
from csda.review.advisor import Advisor
from csda.review.guards import Guard, allowed_hosts, is_loopback
from csda.review.pictures import Pictures
from csda.review.session import MOST_AT_ONCE, STATES, Filter, Session

PORT = 8765
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}

State = Literal["open", "labeled", "skipped", "flagged"]
Name = Literal["unlabeled", "given"]
Number = Annotated[int, InPath(ge=0, lt=2**31)]
Label = Annotated[int, Field(ge=0, lt=2**31)]
Classes = Annotated[list[Label], Field(max_length=1000)]


class Problem(BaseModel):
    detail: str


class About(BaseModel):
    title: str
    classes: list[str]
    multi_label: bool
    who: str
    orders: dict[str, list[str]]
    meanings: dict[str, str]
    defaults: dict[str, str]
    counts: dict[str, int]
    predicts: bool
    can_predict: bool
    can_refresh: bool
    has_features: bool
    has_attention: bool
    key: str


class Item(BaseModel):
    number: int
    place: int
    name: str
    state: State
    audit: bool
    given: str | None
    label: str | None
    predicted: str | None
    confidence: float | None


class Page(BaseModel):
    items: list[Item]
    after: int | None
    matching: int


class Neighbour(BaseModel):
    number: int
    name: str
    label: str
    similarity: float


class Details(Item):
    probs: list[float] | None
    aligned: list[float] | None
    levels: tuple[float, float] | None
    window: tuple[float, float] | None
    neighbours: list[Neighbour]
    decisions: int


class Choice(BaseModel):
    """A decision on some images: a label (its classes by position), skipped, or flagged as unusable.

    `labels` has a label for each image, instead of one for all.
    """

    model_config = ConfigDict(extra="forbid")
    images: Annotated[list[Label], Field(min_length=1, max_length=MOST_AT_ONCE)]
    action: Literal["label", "skip", "flag"]
    label: Classes = []
    labels: Annotated[list[Classes], Field(max_length=MOST_AT_ONCE)] | None = None


class Kept(BaseModel):
    """What is stored: the number of the last decision, and the images in their current state."""

    last: int
    items: list[Item]


class Changes(Kept):
    """Background work: the share of the features that has been computed, or why there are none."""

    progress: float | None
    problem: str | None


class Tally(BaseModel):
    name: str
    labeled: int
    given: int


class Share(BaseModel):
    name: str | None
    right: int
    count: int
    low: float | None
    high: float | None


class Audit(BaseModel):
    all: Share
    classes: list[Share]
    every: int


class Summary(BaseModel):
    classes: list[Tally]
    states: dict[str, dict[str, int]]
    decisions: int
    audit: Audit


class Prediction(BaseModel):
    predicted: str
    probs: list[float]


class Refreshed(BaseModel):
    learned_from: int


def create_app(session: Session, advisor: Advisor | None = None) -> FastAPI:
    """The application without its guards, which `guarded` and `serve` add."""
    problems: dict[int | str, dict[str, Any]] = {
        code: {"model": Problem} for code in (400, 401, 403, 404, 405, 413, 415, 421, 422, 507)
    }
    app = FastAPI(
        title="csda review", docs_url=None, redoc_url=None, openapi_url="/api/openapi.json", responses=problems
    )
    advisor = advisor or Advisor(session)
    pictures = Pictures(session.dataset)
    texts = _static()
    key = secrets.token_hex(4)

    @app.exception_handler(CsdaError)
    async def explain(_request: Request, error: CsdaError) -> JSONResponse:
        kinds = ((ConfigError, 400), (DataError, 404), (RunError, 507))
        status = next((code for kind, code in kinds if isinstance(error, kind)), 400)
        return JSONResponse({"detail": str(error)}, status)

    def require(number: int) -> int:
        if number >= len(session.records):
            raise HTTPException(404, "there is no such image")
        return number

    def item(number: int, place: int = -1) -> dict[str, Any]:
        confidence = float(session.confidence[number])
        return {
            "number": number,
            "place": place,
            "name": session.shown_names[number],
            "state": STATES[session.state[number]],
            "audit": bool(session.audited[number]),
            "confidence": confidence if confidence == confidence else None,
            **session.label_texts(number),
        }

    @app.get("/", include_in_schema=False)
    def page() -> Response:
        return Response(texts["index.html"], media_type=TYPES[".html"])

    @app.get("/static/{name}", include_in_schema=False)
    def static(name: str) -> Response:
        if name not in texts or name == "index.html":
            raise HTTPException(404, "there is no such file")
        return Response(texts[name], media_type=TYPES[Path(name).suffix])

    @app.get("/api/session")
    def about() -> About:
        return About(
            title=session.title,
            classes=list(session.classes),
            multi_label=session.multi_label,
            who=session.who,
            orders={name: session.orders(name) for name in session.listings},
            meanings=ordering.ORDERS,
            defaults={name: session.default_order(name) for name in session.listings},
            counts={name: len(listing.numbers) for name, listing in session.listings.items()},
            predicts=session.said is not None,
            can_predict=advisor.can_predict,
            can_refresh=advisor.can_refresh,
            has_features=advisor.can_refresh,
            has_attention=advisor.has_attention,
            key=key,
        )

    @app.get("/api/images")
    def images(
        name: Annotated[Name, Query(alias="list")] = "unlabeled",
        order: Annotated[str | None, Query(max_length=40)] = None,
        state: State | None = None,
        predicted: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
        low: Annotated[float, Query(ge=0, le=1)] = 0.0,
        high: Annotated[float, Query(ge=0, le=1)] = 1.0,
        search: Annotated[str, Query(max_length=200)] = "",
        after: Annotated[int, Query(ge=-1, lt=2**31)] = -1,
        limit: Annotated[int, Query(ge=1, le=MOST_AT_ONCE)] = 60,
    ) -> Page:
        if predicted is not None and predicted >= len(session.classes):
            raise HTTPException(400, "there is no such class")
        order = order or session.default_order(name)
        shown, following, matching = session.page(
            name, order, Filter(state, predicted, low, high, search), after, limit
        )
        return Page.model_validate(
            {"items": [item(number, place) for place, number in shown], "after": following, "matching": matching}
        )

    @app.get("/api/images/{number}")
    def details(number: Number) -> Details:
        require(number)
        said = session.said
        known = said is not None and bool(session.confidence[number] == session.confidence[number])
        aligned = said.aligned[number] if said is not None and said.aligned is not None and known else None
        if aligned is not None and not np.isfinite(aligned).all():  # an image that came with its label
            aligned = None
        grey = pictures.levels(session.records[number])
        return Details.model_validate(
            {
                **item(number),
                "probs": said.probs[number].tolist() if said is not None and known else None,
                "aligned": None if aligned is None else aligned.tolist(),
                "levels": grey and grey[0],
                "window": grey and grey[1],
                "neighbours": session.neighbours(number),
                "decisions": session.log.count(session.names[number]),
            }
        )

    picture: dict[str, Any] = {
        "response_class": Response,
        "responses": {200: {"content": {"image/webp": {"schema": {"type": "string", "format": "binary"}}}}},
    }

    @app.get("/api/images/{number}/thumbnail", **picture)
    def thumbnail(number: Number) -> Response:
        content = pictures.thumbnail(session.records[require(number)])
        return Response(content, media_type="image/webp", headers={"Cache-Control": "private, max-age=86400"})

    @app.get("/api/images/{number}/picture", **picture)
    def large(
        number: Number,
        low: Annotated[float | None, Query(ge=-1e9, le=1e9)] = None,
        high: Annotated[float | None, Query(ge=-1e9, le=1e9)] = None,
    ) -> Response:
        if (low is None) != (high is None) or (low is not None and high is not None and low >= high):
            raise HTTPException(400, "a window needs both ends, the lower one first")
        window = (low, high) if low is not None and high is not None else None
        return Response(pictures.large(session.records[require(number)], window), media_type="image/webp")

    @app.get("/api/images/{number}/attention", **picture)
    def attention(number: Number, label: Annotated[int, Query(ge=0, lt=2**31)]) -> Response:
        require(number)
        if not advisor.has_attention:
            raise HTTPException(400, "Grad-CAM needs the model of a run")
        if label >= len(session.classes):
            raise HTTPException(400, "there is no such class")
        return Response(advisor.attention(session.records[number], label), media_type="image/webp")

    @app.post("/api/decisions")
    def decide(choice: Choice) -> Kept:
        for number in choice.images:
            require(number)
        if choice.labels is not None and (choice.label or len(choice.labels) != len(choice.images)):
            raise HTTPException(400, "give one label for all images, or as many labels as images")
        if any(label >= len(session.classes) for each in (choice.label, *(choice.labels or ())) for label in each):
            raise HTTPException(400, "there is no such class")
        if choice.action != "label" and (choice.label or choice.labels):
            raise HTTPException(400, "only the action label takes classes")
        decisions = session.decide(choice.images, choice.action, choice.label, choice.labels)
        return Kept.model_validate(
            {"last": decisions[-1].number, "items": [item(number) for number in dict.fromkeys(choice.images)]}
        )

    @app.post("/api/undo")
    def undo() -> Kept:
        decisions = session.undo()
        numbers = [session.number_of[each.image] for each in decisions if each.image in session.number_of]
        return Kept.model_validate(
            {"last": len(session.log.decisions), "items": [item(number) for number in dict.fromkeys(numbers)]}
        )

    @app.get("/api/changes")
    def changes(since: Annotated[int, Query(ge=0, lt=2**31)]) -> Changes:
        recent = session.log.decisions[since:][-MOST_AT_ONCE:]
        numbers = dict.fromkeys(session.number_of[each.image] for each in recent if each.image in session.number_of)
        return Changes.model_validate(
            {
                "last": len(session.log.decisions),
                "items": [item(number) for number in numbers],
                "progress": advisor.progress,
                "problem": advisor.problem,
            }
        )

    @app.get("/api/summary")
    def summary() -> Summary:
        return Summary.model_validate({**session.tally(), "audit": session.audit()})

    @app.post("/api/refresh")
    def refresh() -> Refreshed:
        """Train the probe on the labels so far, and order the images again."""
        if not advisor.can_refresh:
            raise HTTPException(400, "there are no features to learn from")
        return Refreshed(learned_from=advisor.refresh())

    body = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}

    @app.post("/api/predict", openapi_extra={"requestBody": {**body, "required": True}})
    async def predict(request: Request) -> Prediction:
        """The prediction for an image file, which is the body of the request."""
        if not advisor.can_predict:
            raise HTTPException(400, "there is no model; open a run to see predictions")
        content = await request.body()
        if not content:
            raise HTTPException(400, "send an image file")
        try:
            predicted, probs = await run_in_threadpool(advisor.predict, content)
        except DataError as error:
            raise HTTPException(415, str(error)) from None
        return Prediction(predicted=predicted, probs=probs)

    return app


def guarded(
    app: FastAPI, host: str = "127.0.0.1", token: str | None = None, extra: frozenset[str] = frozenset()
) -> Any:
    """The application with its guards; `extra` are further names of this host."""
    return Guard(app, allowed_hosts(host) | extra, token)


def serve(
    session: Session,
    host: str = "127.0.0.1",
    port: int | None = None,
    announce: Callable[[str], None] = print,
    advisor: Advisor | None = None,
) -> None:
    """Serve until interrupted. Unless a port is given, the first free one from 8765 on is used."""
    import uvicorn

    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    listener = _listen(host, port)
    try:
        number = listener.getsockname()[1]
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{number}/" + (f"?token={token}" if token else "")
        config = uvicorn.Config(
            guarded(create_app(session, advisor), host, token),
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
        announce(f"{address}\nCtrl-C stops the server. Decisions are in {session.log.path}.")
        with unremarked():
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()


def _listen(host: str, port: int | None) -> socket.socket:
    """A listening socket at the port, or at the first free one."""
    ports = [port] if port is not None else [*range(PORT, PORT + 20), 0]
    for number in ports:
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
            # With this protocol number asyncio sends small answers at once instead of after 40 ms.
            listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        except OSError as error:
            raise ConfigError(f"--host {host}: {error.strerror or error}; give an address of this machine") from None
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            listener.close()
            if number == ports[-1]:
                raise ConfigError(
                    f"{host}, port {number}: {(error.strerror or str(error)).lower()}; give another --port or --host"
                ) from None
            continue
        return listener
    raise AssertionError


def _static() -> dict[str, bytes]:
    """The files of the page by name, including the report's stylesheet."""
    folder = files("csda.review") / "static"
    found = {entry.name: entry.read_bytes() for entry in folder.iterdir() if Path(entry.name).suffix in TYPES}
    return found | {"report.css": (files("csda.report") / "style.css").read_bytes()}
