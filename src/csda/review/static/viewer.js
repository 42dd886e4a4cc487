// One image: zoom and pan, brightness and contrast, the window of files with many grey values, where the network looks.

const $ = (id) => document.getElementById(id);

export class Viewer {
  constructor() {
    this.view = $("view");
    this.picture = $("picture");
    this.attention = $("attention");
    this.number = null;
    this.timer = null;
    this.pointers = new Map();
    this.view.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.view.addEventListener("pointerdown", (event) => this.press(event));
    this.view.addEventListener("pointermove", (event) => this.drag(event));
    for (const name of ["pointerup", "pointercancel"]) {
      this.view.addEventListener(name, (event) => this.pointers.delete(event.pointerId));
    }
    this.view.addEventListener("dblclick", () => this.reset());
    for (const id of ["brightness", "contrast"]) $(id).addEventListener("input", () => this.tone());
    for (const id of ["low", "high"]) $(id).addEventListener("input", () => this.lay(id));
    $("plain").addEventListener("click", () => this.asItIs());
    this.reset();
  }

  show(number, key) {
    if (this.number !== number) this.reset();
    this.number = number;
    this.key = key;
    this.picture.src = `/api/images/${number}/thumbnail?v=${key}`;
    this.hideAttention();
    clearTimeout(this.timer);
    // Whoever moves on at once does not load what nobody looks at.
    this.timer = setTimeout(() => this.load(), 60);
  }

  load(window = "") {
    const address = `/api/images/${this.number}/picture?v=${this.key}${window}`;
    const loading = new Image();
    this.loading = loading;
    loading.onload = () => { if (this.loading === loading) this.picture.src = address; };
    loading.src = address;
  }

  // `levels` are the limits of the sliders, and `window` is what the picture has by default.
  setLevels(levels, window) {
    this.window = window;
    $("window").hidden = levels === null;
    if (levels === null) return;
    const [low, high] = levels;
    for (const id of ["low", "high"]) Object.assign($(id), { min: low, max: high, step: "any" });
    this.setWindow();
  }

  setWindow() {
    [$("low").value, $("high").value] = this.window;
    this.tell();
  }

  tell() {
    const digits = $("low").max - $("low").min < 100 ? 3 : 0;
    for (const id of ["low", "high"]) $(`${id}-value`).textContent = Number($(id).value).toFixed(digits);
  }

  // The end that is moved stops before the other one.
  lay(moved) {
    const least = ($("low").max - $("low").min) / 500;
    if (moved === "low") $("low").value = Math.min(Number($("low").value), Number($("high").value) - least);
    else $("high").value = Math.max(Number($("high").value), Number($("low").value) + least);
    this.tell();
    const low = Number($("low").value);
    const high = Number($("high").value);
    if (low >= high) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.load(`&low=${low}&high=${high}`), 80);
  }

  tone() {
    this.picture.style.filter = `brightness(${$("brightness").value}%) contrast(${$("contrast").value}%)`;
  }

  asItIs() {
    $("brightness").value = $("contrast").value = 100;
    this.tone();
    if (!$("window").hidden) {
      this.setWindow();
      clearTimeout(this.timer);
      this.load();
    }
  }

  lookAt(label) {
    this.attention.src = `/api/images/${this.number}/attention?label=${label}`;
    this.attention.hidden = false;
    $("look").setAttribute("aria-pressed", "true");
  }

  hideAttention() {
    this.attention.hidden = true;
    this.attention.removeAttribute("src");
    $("look").setAttribute("aria-pressed", "false");
  }

  reset() {
    this.scale = 1;
    this.x = this.y = 0;
    this.place();
  }

  // The picture cannot be dragged out of sight.
  place() {
    const within = (value, most) => Math.min(most, Math.max(-most, value));
    this.x = within(this.x, ((this.scale - 1) * this.view.clientWidth) / 2);
    this.y = within(this.y, ((this.scale - 1) * this.view.clientHeight) / 2);
    for (const image of [this.picture, this.attention]) {
      image.style.transform = `translate(${this.x}px, ${this.y}px) scale(${this.scale})`;
    }
    this.view.classList.toggle("zoomed", this.scale > 1);
  }

  zoomBy(factor, x = this.view.clientWidth / 2, y = this.view.clientHeight / 2) {
    const before = this.scale;
    this.scale = Math.min(16, Math.max(1, before * factor));
    const dx = x - this.view.clientWidth / 2;
    const dy = y - this.view.clientHeight / 2;
    this.x = dx - (dx - this.x) * (this.scale / before);
    this.y = dy - (dy - this.y) * (this.scale / before);
    if (this.scale === 1) this.x = this.y = 0;
    this.place();
  }

  wheel(event) {
    event.preventDefault();
    const box = this.view.getBoundingClientRect();
    this.zoomBy(event.deltaY < 0 ? 1.2 : 1 / 1.2, event.clientX - box.left, event.clientY - box.top);
  }

  press(event) {
    this.pointers.set(event.pointerId, event);
    this.view.setPointerCapture(event.pointerId);
  }

  drag(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return;
    if (this.pointers.size === 2) {
      const [other] = [...this.pointers.values()].filter((each) => each.pointerId !== event.pointerId);
      const distance = (each) => Math.hypot(each.clientX - other.clientX, each.clientY - other.clientY);
      if (distance(before) > 0) this.zoomBy(distance(event) / distance(before));
    } else if (this.scale > 1) {
      this.x += event.clientX - before.clientX;
      this.y += event.clientY - before.clientY;
      this.place();
    }
    this.pointers.set(event.pointerId, event);
  }
}
