// Requests to the server that sent this page, and to no other.

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", ...options });
  } catch {
    throw new Error("the server does not answer; is `csda review` still running?");
  }
  if (!answer.ok) {
    let detail = `${answer.status}`;
    try {
      const problem = (await answer.json()).detail;
      detail = typeof problem === "string" ? problem : "the request is not understood";
    } catch { /* no sentence came with it */ }
    throw new Error(detail);
  }
  return answer.json();
}

const marked = { "X-CSDA-Review": "1" };

export function get(path, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value != null));
  return ask(query.size ? `${path}?${query}` : path);
}

export function post(path, body = null) {
  return ask(path, {
    method: "POST",
    headers: body === null ? marked : { ...marked, "Content-Type": "application/json" },
    body: body === null ? null : JSON.stringify(body),
  });
}

export function send(path, file) {
  return ask(path, { method: "POST", headers: { ...marked, "Content-Type": "application/octet-stream" }, body: file });
}

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

export const percent = (share) => `${Math.round(100 * share)} %`;
