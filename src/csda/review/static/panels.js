// What stands beside the image: classes with their probabilities and counts, neighbours, and what predictions are worth.

import { element, percent } from "/static/api.js";

const $ = (id) => document.getElementById(id);

export function keyOf(position) {
  if (position < 9) return `${position + 1}`;
  return position < 18 ? `⇧${position - 8}` : "";
}

// A long name may go on in the next line after an underscore.
function breakable(name) {
  return name.split(/(?<=_)/).flatMap((part, position) => (position ? [element("wbr"), part] : [part]));
}

// Buttons of the classes, made once; `choose(position)` is what one of them does.
export function makeClasses(about, choose) {
  $("classes").replaceChildren(...about.classes.map((name, position) => element(
    "button",
    { type: "button", class: "class", "data-position": position, onclick: () => choose(position) },
    element("kbd", {}, keyOf(position)),
    element("span", { class: "label" }, ...breakable(name)),
    element("span", { class: "share" }),
    element("span", { class: "count", title: "images with this label" }),
    element("span", { class: "bar", "aria-hidden": "true" }, element("i"), element("b")),
  )));
}

// Probabilities, and what is chosen: a set of positions.
export function showClasses(about, details, chosen, suggested) {
  $("legend").hidden = details?.aligned == null;
  for (const button of $("classes").children) {
    const position = Number(button.dataset.position);
    const share = details?.probs?.[position];
    const aligned = details?.aligned?.[position];
    button.querySelector(".share").replaceChildren(
      share == null ? "" : percent(share),
      aligned == null ? "" : element("small", {}, ` → ${percent(aligned)}`),
    );
    button.querySelector(".bar i").style.width = share == null ? "0" : `${100 * share}%`;
    const mark = button.querySelector(".bar b");
    mark.hidden = aligned == null;
    if (aligned != null) mark.style.left = `${100 * aligned}%`;
    button.title = aligned == null ? "" : `${percent(share)} before alignment, ${percent(aligned)} after`;
    button.setAttribute("aria-pressed", chosen.has(position) ? "true" : "false");
    button.classList.toggle("suggested", suggested.has(position));
  }
}

export function showCounts(summary, list) {
  summary.classes.forEach((each, position) => {
    const button = $("classes").children[position];
    if (button) button.querySelector(".count").textContent = `${each.labeled + each.given}`;
  });
  const { open, labeled, skipped, flagged } = summary.states[list];
  const others = [[skipped, "skipped"], [flagged, "unusable"]].filter(([count]) => count);
  $("progress").replaceChildren(
    element("b", {}, labeled.toLocaleString("en")), list === "given" ? " labeled again" : " labeled",
    ...others.flatMap(([count, name]) => [", ", element("b", {}, count.toLocaleString("en")), ` ${name}`]),
    ", ", element("b", {}, open.toLocaleString("en")), list === "given" ? " as given" : " open",
  );
}

export function showAudit(about, audit) {
  $("audit").hidden = !about.predicts;
  const row = (each, name) => {
    const known = each.count > 0;
    const gauge = element("span", { class: "gauge", "aria-hidden": "true" });
    if (known) {
      const range = element("i");
      range.style.left = `${100 * each.low}%`;
      range.style.width = `${100 * (each.high - each.low)}%`;
      const mark = element("b");
      mark.style.left = `${(100 * each.right) / each.count}%`;
      gauge.append(range, mark);
    }
    return element(
      "tr", {},
      element("th", { scope: "row" }, name),
      element("td", {}, known ? `${each.right} of ${each.count}` : "–"),
      element("td", {}, known ? `${percent(each.low)} to ${percent(each.high)}` : ""),
      element("td", { class: "drawn" }, gauge),
    );
  };
  const { all } = audit;
  const said = all.count
    ? `${all.right} of ${all.count} images that were drawn at random and labeled have the predicted label.`
    : `One image in ${audit.every} is drawn at random and marked as audit. The labels of these images measure the accuracy of the predictions. Images that an order puts first are harder than others, so they are not counted.`;
  const content = [element("p", { class: "note" }, said)];
  if (all.count) {
    content.push(element(
      "table", {},
      element("thead", {}, element("tr", {}, ...["Predicted", "Right", "95 % interval", ""].map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, row(all, "all"), ...audit.classes.map((each) => row(each, each.name))),
    ));
  }
  $("worth").replaceChildren(...content);
}

export function showNeighbours(details, key) {
  const found = details?.neighbours ?? [];
  $("neighbours").hidden = !found.length;
  if (!found.length) return;
  $("neighbours").replaceChildren(
    element("h2", {}, "Nearest with a label"),
    element("ul", { class: "near" }, ...found.map((each) => element(
      "li", {},
      element("img", { src: `/api/images/${each.number}/thumbnail?v=${key}`, alt: "", loading: "lazy", title: each.name }),
      element("span", {}, each.label),
      element("small", {}, each.similarity.toFixed(2)),
    ))),
  );
}
