// The review page: a grid of images, one of them in focus, and decisions that go to the server in their order.

import { element, get, percent, post, send } from "/static/api.js";
import { makeClasses, showAudit, showClasses, showCounts, showNeighbours } from "/static/panels.js";
import { Viewer } from "/static/viewer.js";

const $ = (id) => document.getElementById(id);
const PAGE = 60;
const POLL = 4000;

const page = {
  about: null,
  list: "unlabeled",
  items: [],
  at: 0, // position of the focus in items
  anchor: 0, // where a selection by Shift begins
  chosen: new Set(), // numbers of selected images
  labels: new Set(), // in a multi-label set: what Enter will keep
  details: null,
  from: -1, // place after which this page begins
  next: null,
  earlier: [], // beginnings of the pages before
  matching: 0,
  last: 0, // number of the last decision that is known here
  pending: 0,
  touched: false, // whether a key or a button was pressed
  clicked: null, // number of the image that was clicked last
  loading: 0,
  unheard: null, // what went wrong in the last poll
};
let viewer;
let queue = Promise.resolve();

// --- beginning ------------------------------------------------------------------------------------------------------

async function begin() {
  if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", `/${location.hash}`);
  viewer = new Viewer();
  const wanted = new URLSearchParams(location.hash.slice(1));
  page.about = await get("/api/session");
  const about = page.about;
  document.title = `Review: ${about.title}`;
  $("title").textContent = about.title;
  page.list = about.counts[wanted.get("list")] ? wanted.get("list") : about.counts.unlabeled ? "unlabeled" : "given";
  makeLists();
  makeClasses(about, choose);
  makeFilters(wanted);
  for (const each of document.querySelectorAll(".said")) each.hidden = !about.predicts;
  document.querySelector("#keys .several").hidden = !about.multi_label;
  $("refresh").hidden = !about.can_refresh;
  $("look").hidden = !about.has_attention;
  if (about.multi_label) $("accept").firstChild.textContent = "Keep ";
  page.from = Number(wanted.get("after") ?? -1);
  listen();
  await Promise.all([load(), summarise()]);
  poll();
  setInterval(poll, POLL);
}

function makeLists() {
  const titles = { unlabeled: "To label", given: "Given labels" };
  $("lists").replaceChildren(...Object.entries(titles)
    .filter(([name]) => page.about.counts[name])
    .map(([name, title]) => element(
      "button",
      { type: "button", "aria-pressed": name === page.list ? "true" : "false", onclick: () => openList(name) },
      title, " ", element("small", {}, page.about.counts[name].toLocaleString("en")),
    )));
}

function openList(name) {
  page.list = name;
  makeLists();
  makeFilters(new URLSearchParams());
  restart();
  summarise();
}

function makeFilters(wanted) {
  const form = $("filters");
  const { orders, meanings, classes } = page.about;
  const known = orders[page.list];
  form.order.replaceChildren(...known.map((name) => element("option", { value: name, title: meanings[name] }, name)));
  form.order.value = known.includes(wanted.get("order")) ? wanted.get("order")
    : page.about.defaults[page.list];
  form.predicted.replaceChildren(
    element("option", { value: "" }, "any class"),
    ...classes.map((name, position) => element("option", { value: position }, name)),
  );
  form.state.value = wanted.get("state") ?? (page.list === "given" ? "" : "open");
  form.predicted.value = wanted.get("predicted") ?? "";
  form.low.value = wanted.get("low") ?? 0;
  form.high.value = wanted.get("high") ?? 100;
  form.search.value = wanted.get("search") ?? "";
}

function parameters() {
  const form = $("filters");
  const share = (input, otherwise) => {
    const value = Number(input.value);
    return input.value === "" || !(value >= 0 && value <= 100) ? otherwise : value / 100;
  };
  return {
    list: page.list,
    order: form.order.value,
    state: form.state.value,
    predicted: form.predicted.value,
    low: share(form.low, 0),
    high: share(form.high, 1),
    search: form.search.value.slice(0, 200),
  };
}

function remember() {
  const form = $("filters");
  const kept = {
    list: page.list, order: form.order.value, state: form.state.value, predicted: form.predicted.value,
    low: form.low.value, high: form.high.value, search: form.search.value, after: page.from,
  };
  history.replaceState(null, "", `#${new URLSearchParams(Object.entries(kept))}`);
}

// --- pages ----------------------------------------------------------------------------------------------------------

async function load({ last = false, keep = null } = {}) {
  const ticket = ++page.loading;
  remember();
  let found;
  try {
    found = await get("/api/images", { ...parameters(), after: page.from, limit: PAGE });
  } catch (error) {
    complain(error);
    return;
  }
  if (ticket !== page.loading) return;
  Object.assign(page, { items: found.items, next: found.after, matching: found.matching });
  page.chosen.clear();
  page.at = last ? Math.max(0, page.items.length - 1) : Math.max(0, page.items.findIndex((each) => each.number === keep));
  page.anchor = page.at;
  drawGrid();
  focus(page.at, { quiet: true });
}

function restart() {
  page.from = -1;
  page.earlier = [];
  return load();
}

async function nextPage() {
  if (page.next === null) return say("This is the last page.");
  page.earlier.push(page.from);
  page.from = page.next;
  await load();
  $("grid").scrollIntoView({ block: "nearest" });
}

async function previousPage(last = false) {
  if (page.from < 0) return say("This is the first page.");
  page.from = page.earlier.length ? page.earlier.pop() : -1;
  await load({ last });
}

// --- the grid -------------------------------------------------------------------------------------------------------

const words = { open: "", labeled: "labeled", skipped: "skipped", flagged: "unusable" };

function describe(item) {
  return [
    item.name,
    item.given ? `given ${item.given}` : null,
    item.predicted ? `predicted ${item.predicted}, ${percent(item.confidence ?? 0)}` : null,
    item.label ? `labeled ${item.label}` : words[item.state] || "open",
    item.audit ? "audit" : null,
  ].filter(Boolean).join(", ");
}

function drawGrid() {
  const { key } = page.about;
  $("grid").replaceChildren(...page.items.map((item, position) => element(
    "li",
    { role: "option", class: "card", id: `image-${item.number}`, tabindex: "-1", "data-position": position },
    element("img", { src: `/api/images/${item.number}/thumbnail?v=${key}`, alt: "", loading: position < 24 ? "eager" : "lazy", decoding: "async", draggable: "false" }),
    element("span", { class: "mark" }),
    element("span", { class: "text" }),
  )));
  page.items.forEach((_, position) => drawCard(position));
  $("empty").hidden = page.items.length > 0;
  $("empty").textContent = page.matching === 0 ? nothing() : "";
  $("pager").hidden = page.next === null && page.from < 0;
  $("before").disabled = page.from < 0;
  $("after").disabled = page.next === null;
  const order = $("filters").order.value;
  $("matching").textContent = page.items.length
    ? `${page.matching.toLocaleString("en")} images, ${page.about.meanings[order] ?? ""}`
    : "";
}

function nothing() {
  const { state } = parameters();
  return state === "open" ? "No image is open. Choose another state or class, or train with the labels."
    : "No image matches.";
}

function drawCard(position) {
  const item = page.items[position];
  const card = $("grid").children[position];
  if (!card) return;
  card.className = `card ${item.state}`;
  card.classList.toggle("audit", item.audit);
  card.classList.toggle("pending", Boolean(item.pending));
  card.setAttribute("aria-label", describe(item));
  card.title = describe(item);
  card.setAttribute("aria-selected", page.chosen.has(item.number) ? "true" : "false");
  card.tabIndex = position === page.at ? 0 : -1;
  card.classList.toggle("here", position === page.at);
  card.querySelector(".mark").textContent = item.audit ? "audit" : "";
  const text = card.querySelector(".text");
  if (item.state === "labeled") text.replaceChildren(element("b", {}, item.label ?? ""));
  else if (item.state !== "open") text.replaceChildren(element("i", {}, words[item.state]));
  else if (item.given) {
    const contradicts = item.predicted && item.predicted !== item.given;
    const says = contradicts ? element("small", { class: "contrary" }, `${item.predicted} ${percent(item.confidence ?? 0)}?`) : null;
    text.replaceChildren(element("span", { class: "pair" }, element("span", {}, item.given), says));
  }
  else if (item.predicted) text.replaceChildren(element("span", {}, item.predicted), element("small", {}, percent(item.confidence ?? 0)));
  else text.replaceChildren(element("small", {}, item.name.split("/").pop()));
}

function redraw(...positions) {
  for (const position of positions) if (page.items[position]) drawCard(position);
}

function drawSelection() {
  page.items.forEach((_, position) => drawCard(position));
  $("selected").hidden = page.chosen.size === 0;
  $("selected").replaceChildren(
    `${page.chosen.size} selected; a label applies to all of them. `,
    element("button", { type: "button", onclick: clearSelection }, "Select none"),
  );
}

function clearSelection() {
  page.chosen.clear();
  drawSelection();
}

// --- focus ----------------------------------------------------------------------------------------------------------

function focus(position, { quiet = false, extend = false } = {}) {
  const before = page.at;
  page.at = Math.max(0, Math.min(position, page.items.length - 1));
  if (!extend) page.anchor = page.at;
  else {
    const [from, to] = [Math.min(page.anchor, page.at), Math.max(page.anchor, page.at)];
    page.chosen = new Set(page.items.slice(from, to + 1).map((item) => item.number));
  }
  if (extend || page.chosen.size) drawSelection();
  else {
    $("selected").hidden = true;
    redraw(before, page.at);
  }
  const item = page.items[page.at];
  $("focus").classList.toggle("nothing", !item);
  if (!item) return;
  const card = $("grid").children[page.at];
  const typing = document.activeElement?.closest("#filters");
  if (!quiet || (!typing && document.activeElement === document.body)) {
    card.focus({ preventScroll: true });
    card.scrollIntoView({ block: "nearest" });
  }
  show(item);
}

function show(item) {
  page.details = null;
  viewer.show(item.number, page.about.key);
  $("picture").alt = describe(item);
  $("name").textContent = item.name;
  $("name").title = item.name;
  $("place").textContent = `${page.at + 1} of ${page.items.length} on this page`;
  page.labels = new Set(positionsOf(item.label ?? item.given ?? item.predicted));
  drawChoice(item);
  const { number } = item;
  clearTimeout(show.timer);
  show.timer = setTimeout(async () => {
    try {
      const details = await get(`/api/images/${number}`);
      if (page.items[page.at]?.number !== number) return;
      page.details = details;
      viewer.setLevels(details.levels, details.window);
      drawChoice(page.items[page.at]);
    } catch (error) {
      complain(error);
    }
  }, 40);
}

function positionsOf(text) {
  if (text == null || text === "(none)") return [];
  const names = page.about.multi_label ? text.split("|") : [text];
  return names.map((name) => page.about.classes.indexOf(name)).filter((position) => position >= 0);
}

function suggestion(item) {
  return item.predicted ?? item.given;
}

function drawChoice(item) {
  const decided = page.about.multi_label ? page.labels : new Set(positionsOf(item.label));
  showClasses(page.about, page.details, decided, new Set(positionsOf(suggestion(item))));
  showNeighbours(page.details, page.about.key);
  $("accept").disabled = !page.about.multi_label && !suggestion(item);
}

// --- deciding -------------------------------------------------------------------------------------------------------

function targets() {
  const item = page.items[page.at];
  return page.chosen.size ? page.items.filter((each) => page.chosen.has(each.number)) : item ? [item] : [];
}

function choose(position) {
  if (position >= page.about.classes.length || !page.items.length) return;
  if (!page.about.multi_label) {
    decide("label", [position]);
    return;
  }
  if (page.labels.has(position)) page.labels.delete(position);
  else page.labels.add(position);
  drawChoice(page.items[page.at]);
  const name = page.about.classes[position];
  say(`${name} ${page.labels.has(position) ? "marked" : "not marked"}; Enter keeps it.`);
}

function accept() {
  if (!page.items.length) return;
  if (page.about.multi_label) {
    decide("label", [...page.labels]);
    return;
  }
  const items = targets().filter(suggestion);
  if (!items.length) return say("There is no suggestion to accept; press the number of a class.");
  decide("label", items.map((item) => positionsOf(suggestion(item))), items);
}

// `label` is one for all items, or has one for each.
function decide(action, label = [], items = targets()) {
  if (!items.length) return;
  const before = items.map((item) => ({ item, state: item.state, label: item.label }));
  const each = Array.isArray(label[0]);
  const texts = items.map((_, place) => (each ? label[place] : label).map((position) => page.about.classes[position]));
  items.forEach((item, place) => {
    item.state = { label: "labeled", skip: "skipped", flag: "flagged" }[action];
    item.label = action === "label" ? texts[place].join("|") || "(none)" : null;
    item.pending = true;
  });
  page.pending += 1;
  const images = items.map((item) => item.number);
  const kept = queue.then(() => post("/api/decisions", { images, action, [each ? "labels" : "label"]: label }));
  queue = kept.then(
    (answer) => {
      take(answer);
      const said = [...new Set(texts.map((names) => names.join(", ")))].join("; ");
      const what = action === "label" ? said || "none of the classes" : words[items[0].state];
      say(`${items.length === 1 ? items[0].name : `${items.length} images`}: ${what}. Kept.`);
    },
    (error) => {
      for (const { item, state, label: text } of before) Object.assign(item, { state, label: text, pending: false });
      page.items.forEach((_, position) => drawCard(position));
      complain(new Error(`${LOST}${error.message}`));
    },
  ).finally(() => {
    page.pending -= 1;
    if (!page.pending) summarise();
  });
  advance();
}

// After a decision: the next image of the page that is open, or the next page.
function advance() {
  page.chosen.clear();
  drawSelection();
  const following = page.items.findIndex((item, position) => position > page.at && item.state === "open");
  const lists = page.list === "given" ? page.at + 1 : following;
  if (lists > 0 && lists < page.items.length) focus(lists);
  else if (page.next !== null) queue = queue.then(nextPage);
  else focus(page.at);
}

function take(answer) {
  page.last = Math.max(page.last, answer.last);
  for (const changed of answer.items) {
    const position = page.items.findIndex((item) => item.number === changed.number);
    if (position < 0) continue;
    const item = page.items[position];
    Object.assign(item, changed, { place: item.place, pending: false });
    drawCard(position);
    if (position === page.at) {
      page.labels = new Set(positionsOf(item.label ?? item.given ?? item.predicted));
      drawChoice(item);
    }
  }
}

function undo() {
  queue = queue.then(async () => {
    try {
      const answer = await post("/api/undo");
      if (!answer.items.length) return say("There is nothing to undo.");
      const there = page.items.findIndex((item) => item.number === answer.items[0].number);
      take(answer);
      if (there >= 0) focus(there);
      const name = answer.items.length === 1 ? answer.items[0].name : `${answer.items.length} images`;
      say(there >= 0 ? `Undone: ${name}.` : `Undone: ${name}, which is on another page.`);
      await summarise();
    } catch (error) {
      complain(error);
    }
  });
}

async function refresh() {
  if (!page.about.can_refresh) return;
  say("Learning from the labels so far …");
  $("refresh").disabled = true;
  try {
    await queue;
    const { learned_from: count } = await post("/api/refresh");
    page.about = await get("/api/session");
    for (const each of document.querySelectorAll(".said")) each.hidden = !page.about.predicts;
    makeFilters(new URLSearchParams(location.hash.slice(1)));
    $("filters").order.value = page.about.defaults[page.list];
    await restart();
    await summarise();
    say(`Learned from ${count} labels; the order is new.`);
  } catch (error) {
    complain(error);
  }
  $("refresh").disabled = false;
}

// --- what else is going on ------------------------------------------------------------------------------------------

async function summarise() {
  try {
    const summary = await get("/api/summary");
    page.last = Math.max(page.last, summary.decisions);
    showCounts(summary, page.list);
    showAudit(page.about, summary.audit);
  } catch (error) {
    complain(error);
  }
}

// What another tab, or another person, has decided meanwhile.
async function poll() {
  if (document.hidden || page.pending) return;
  try {
    const answer = await get("/api/changes", { since: page.last });
    if ($("problem").textContent === page.unheard) $("problem").hidden = true;
    page.unheard = null;
    await hear(answer);
    if (answer.last === page.last || page.pending) return;
    take(answer);
    await summarise();
  } catch (error) {
    page.unheard = error.message;
    complain(error);
  }
}

// Features are computed in the background. Neighbours and more orders need them.
async function hear({ progress, problem }) {
  const note = $("features");
  if (progress !== null && progress < 1) note.textContent = `Features of images: ${percent(progress)} …`;
  else note.textContent = problem && !page.about.has_features ? "No features" : "";
  note.title = problem ?? "They are needed for neighbours, diversity and suspicious labels.";
  if (progress === 1 && !page.about.has_features) {
    // An image that is being looked at is not exchanged for another, nor an order that was chosen.
    const begun = page.touched || page.pending || $("filters").order.value !== page.about.defaults[page.list];
    page.about = await get("/api/session");
    $("refresh").hidden = !page.about.can_refresh;
    for (const each of document.querySelectorAll(".said")) each.hidden = !page.about.predicts;
    makeFilters(new URLSearchParams(location.hash.slice(1)));
    if (!begun) {
      $("filters").order.value = page.about.defaults[page.list];
      await restart();
    } else drawChoice(page.items[page.at]);
    await summarise();
    say("Features are complete: neighbours, an order by diversity, and suspicious given labels are available."
      + (begun ? " Press R to order the images again." : ""));
  }
}

function say(text) {
  $("status").textContent = text;
  $("problem").hidden = true;
}

const LOST = "Not kept: ";

// What was not kept stays on the screen until something is kept; what fails in the background does not cover it.
function complain(error) {
  if (!$("problem").hidden && $("problem").textContent.startsWith(LOST) && !error.message.startsWith(LOST)) return;
  $("problem").textContent = error.message;
  $("problem").hidden = false;
}

async function drop(file) {
  if (!page.about.can_predict) return complain(new Error("there is no model to predict a dropped image; train, and open the run with csda review RUN"));
  try {
    const said = await send("/api/predict", file);
    const address = URL.createObjectURL(file);
    const rows = page.about.classes
      .map((name, position) => [name, said.probs[position]])
      .sort((one, other) => other[1] - one[1]);
    const picture = element("img", { src: address, alt: "", class: "dropped", onerror: (event) => event.target.remove() });
    $("dropped-content").replaceChildren(
      picture,
      element("p", { class: "name" }, file.name),
      element("table", {}, element("tbody", {}, ...rows.map(([name, share]) => element(
        "tr", {}, element("th", { scope: "row" }, name), element("td", {}, percent(share)),
      )))),
    );
    $("dropped").showModal();
    $("dropped").addEventListener("close", () => URL.revokeObjectURL(address), { once: true });
  } catch (error) {
    complain(error);
  }
}

function look() {
  const item = page.items[page.at];
  if (!page.about.has_attention || !item) return;
  if (!$("attention").hidden) viewer.hideAttention();
  else viewer.lookAt(positionsOf(suggestion(item))[0] ?? 0);
}

function enlarge(wanted = !document.body.classList.contains("large")) {
  document.body.classList.toggle("large", wanted);
  $("zoom").setAttribute("aria-pressed", wanted ? "true" : "false");
  viewer.reset();
}

function adjust() {
  $("sliders").hidden = !$("sliders").hidden;
  $("adjust").setAttribute("aria-expanded", $("sliders").hidden ? "false" : "true");
  if (!$("sliders").hidden) $($("window").hidden ? "brightness" : "low").focus();
}

function openOtherList() {
  const other = page.list === "given" ? "unlabeled" : "given";
  if (page.about.counts[other]) openList(other);
}

function openOnPhone(wanted) {
  document.body.classList.toggle("one", wanted);
  if (!wanted) $("grid").children[page.at]?.focus();
}

// --- keys and clicks ------------------------------------------------------------------------------------------------

function columns() {
  const cards = [...$("grid").children];
  const second = cards.findIndex((card) => card.offsetTop > cards[0].offsetTop);
  return second < 0 ? Math.max(cards.length, 1) : second;
}

async function move(step, extend) {
  const wanted = page.at + step;
  if (wanted >= page.items.length && step === 1 && !extend) await nextPage();
  else if (wanted < 0 && step === -1 && !extend && page.from >= 0) await previousPage(true);
  else if (wanted >= 0 && wanted < page.items.length) focus(wanted, { extend });
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (document.querySelector("dialog[open]")) return;
  const where = event.target;
  if (where.closest("select, textarea, input")) {
    if (event.key === "Escape") where.blur();
    // A slider keeps its arrows; letters and digits mean the same as elsewhere.
    if (where.type !== "range" || event.key.length > 1) return;
  }
  const digit = /^(?:Digit|Numpad)([0-9])$/.exec(event.code)?.[1] ?? (/^[0-9]$/.test(event.key) ? event.key : null);
  if (digit !== null) {
    event.preventDefault();
    if (event.repeat) return;
    if (digit === "0") {
      if (page.about.multi_label) decide("label", []);
    } else choose(Number(digit) - 1 + (event.shiftKey ? 9 : 0));
    return;
  }
  const actions = {
    ArrowRight: () => move(1, event.shiftKey),
    ArrowLeft: () => move(-1, event.shiftKey),
    ArrowDown: () => move(columns(), event.shiftKey),
    ArrowUp: () => move(-columns(), event.shiftKey),
    Home: () => focus(0),
    End: () => focus(page.items.length - 1),
    s: () => decide("skip"),
    f: () => decide("flag"),
    u: undo,
    x: () => toggle(page.at),
    a: () => { page.chosen = new Set(page.items.map((item) => item.number)); drawSelection(); },
    n: nextPage,
    p: () => previousPage(),
    z: () => enlarge(),
    g: look,
    b: adjust,
    l: openOtherList,
    r: refresh,
    "+": () => viewer.zoomBy(1.25),
    "=": () => viewer.zoomBy(1.25),
    "-": () => viewer.zoomBy(0.8),
    "/": () => $("filters").search.focus(),
    "?": () => $("keys").showModal(),
    Escape: () => {
      if (document.body.classList.contains("large")) enlarge(false);
      else if (document.body.classList.contains("one")) openOnPhone(false);
      else clearSelection();
    },
  };
  // Enter on a button is that button's; on an image it accepts.
  if (event.key === "Enter" && !where.closest("button, a, summary")) actions.Enter = accept;
  const action = actions[event.key] ?? actions[event.key.toLowerCase()];
  if (!action) return;
  if (where.closest("summary, [role=tab]") && event.key.length > 1) return;
  event.preventDefault();
  if (event.repeat && !event.key.startsWith("Arrow")) return;
  action();
}

function toggle(position) {
  const item = page.items[position];
  if (!item) return;
  if (!page.chosen.delete(item.number)) page.chosen.add(item.number);
  drawSelection();
}

function click(event) {
  const card = event.target.closest(".card");
  if (!card) return;
  const position = Number(card.dataset.position);
  if (event.ctrlKey || event.metaKey) {
    // The first of several may have been clicked without Ctrl.
    if (!page.chosen.size && position !== page.at && page.items[page.at]?.number === page.clicked) toggle(page.at);
    focus(position);
    toggle(position);
  } else if (event.shiftKey) focus(position, { extend: true });
  else {
    if (page.chosen.size) clearSelection();
    focus(position);
    page.clicked = page.items[position].number;
    openOnPhone(true);
  }
}

function listen() {
  document.addEventListener("keydown", press);
  for (const name of ["keydown", "pointerdown"]) {
    document.addEventListener(name, () => { page.touched = true; }, { capture: true });
  }
  $("grid").addEventListener("click", click);
  $("grid").addEventListener("dblclick", () => enlarge(true));
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  let typed;
  $("filters").addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(restart, 250);
  });
  const clicks = {
    undo, refresh, accept, look,
    skip: () => decide("skip"),
    flag: () => decide("flag"),
    zoom: () => enlarge(),
    before: () => previousPage(),
    after: nextPage,
    close: () => openOnPhone(false),
    more: () => $("more").setAttribute("aria-expanded", $("filters").classList.toggle("open") ? "true" : "false"),
    help: () => $("keys").showModal(),
    adjust,
    "undo-here": undo,
  };
  for (const [id, action] of Object.entries(clicks)) $(id).addEventListener("click", () => action());
  let inside = 0;
  const files = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  document.addEventListener("dragenter", (event) => { if (files(event)) { inside += 1; $("drop").hidden = false; } });
  document.addEventListener("dragleave", (event) => { if (files(event) && --inside <= 0) { inside = 0; $("drop").hidden = true; } });
  document.addEventListener("dragover", (event) => { if (files(event)) event.preventDefault(); });
  document.addEventListener("drop", (event) => {
    if (!files(event)) return;
    event.preventDefault();
    inside = 0;
    $("drop").hidden = true;
    if (event.dataTransfer.files.length) drop(event.dataTransfer.files[0]);
  });
}

begin().catch(complain);
