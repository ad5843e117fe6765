// Stacked bars behind knobs. Every value is here from the beginning, so that a moved knob is drawn at once, kernel or not.

const CSS = `
.d2b { --ink:#1a1a1a; --mute:#5a5a5a; --rule:#d0d0d0; background:#fff; color:var(--ink); font:13px/1.35 system-ui,sans-serif;
  padding:8px 10px; box-sizing:border-box; max-width:760px; }
.d2b :focus-visible { outline:3px solid #0072B2; outline-offset:1px; }
.d2b h4 { margin:0 0 6px; font-size:14px; color:var(--ink); }
.d2b .knob { display:grid; grid-template-columns:7em 1fr 10em; gap:8px; align-items:center; margin:2px 0; }
.d2b input[type=range] { width:100%; accent-color:#0072B2; margin:0; }
.d2b select { font:inherit; color:var(--ink); background:#f3f3f3; border:1px solid #8a8a8a; border-radius:4px; padding:2px 6px; justify-self:start; }
.d2b output { font-weight:600; }
.d2b .plot { position:relative; display:flex; justify-content:space-around; height:230px; margin:26px 0 0 5.5em; border-bottom:1px solid var(--mute); }
.d2b .tick { position:absolute; left:0; right:0; border-top:1px solid var(--rule); }
.d2b .tick span { position:absolute; right:100%; padding-right:6px; transform:translateY(-50%); color:var(--mute); font-size:11px; white-space:nowrap; }
.d2b .bar { position:relative; width:17%; height:100%; display:flex; flex-direction:column-reverse; }
.d2b .part { flex:none; box-sizing:border-box; border-top:1px solid #fff; overflow:hidden; text-align:center; font-size:11px; display:flex; align-items:center; justify-content:center; }
.d2b .part span { background:#ffffffd8; border-radius:3px; padding:0 4px; line-height:14px; }
.d2b .p0 { background:#9ecae8; }
.d2b .p1 { background:repeating-linear-gradient(115deg,#f6cf7f 0 7px,#fff 7px 8.5px); }
.d2b .p2 { background:radial-gradient(#fff 1.2px,transparent 1.4px) 0 0/8px 8px #8fd3bd; }
.d2b .total { position:absolute; left:-30%; right:-30%; text-align:center; font-weight:700; padding-bottom:7px; line-height:15px; }
.d2b .mark { position:absolute; left:calc(100% + 3px); width:8px; height:8px; margin-bottom:-5px; background:#fff; border:1.5px solid var(--ink); transform:rotate(45deg); }
.d2b .names { display:flex; justify-content:space-around; margin:3px 0 0 5.5em; }
.d2b .names span { width:17%; text-align:center; }
.d2b .key { display:flex; flex-wrap:wrap; gap:3px 16px; color:var(--mute); font-size:12px; margin-top:8px; }
.d2b .key i { display:inline-block; width:22px; height:11px; margin-right:5px; vertical-align:-1px; border:1px solid #9a9a9a; }
.d2b .key .mark { position:static; display:inline-block; width:7px; height:7px; margin:0 7px 0 3px; }
`;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function size(bytes) {
  for (const [unit, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= factor) return `${Number((bytes / factor).toPrecision(3))} ${unit}`;
  }
  return `${Number(bytes.toPrecision(3))} B`;
}

const sum = (many) => many.reduce((total, one) => total + one, 0);

// Round numbers from 0 to at most top.
function ticks(top) {
  const rough = top / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough);
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, i) => i * step);
}

function knob({ name, labels, slider }, moved) {
  const control = slider
    ? make("input", { type: "range", min: 0, max: labels.length - 1, step: 1, "aria-label": name })
    : make("select", { "aria-label": name }, ...labels.map((label, i) => make("option", { value: i }, label)));
  const said = make("output", { "aria-hidden": "true" });
  control.addEventListener("input", moved);
  const set = (at) => { control.value = at; };
  const show = () => {
    if (!slider) return;
    said.textContent = labels[control.value];
    control.setAttribute("aria-valuetext", labels[control.value]);
  };
  return { node: make("div", { class: "knob" }, make("span", { "aria-hidden": "true" }, name), control, said), set, show, at: () => Number(control.value) };
}

function bar(values, measured, top) {
  const height = (value) => `${(100 * value) / top}%`;
  const parts = values.map((value, k) => {
    const node = make("div", { class: `part p${k}` }, ...(value > 0.075 * top ? [make("span", {}, size(value))] : []));
    node.style.height = height(value);
    return node;
  });
  const total = make("div", { class: "total" }, size(sum(values)));
  total.style.bottom = height(sum(values));
  const marks = (measured || []).map((_, k) => {
    const node = make("div", { class: "mark" });
    node.style.bottom = height(sum(measured.slice(0, k + 1)));
    return node;
  });
  return make("div", { class: "bar" }, ...parts, total, ...marks);
}

function render({ model, el }) {
  const knobs = model.get("knobs"), bars = model.get("bars"), parts = model.get("parts"), mark = model.get("mark");
  const values = model.get("values"), points = model.get("points");
  const plot = make("div", { class: "plot", "aria-hidden": "true" });
  const words = make("div", { role: "status", "aria-live": "polite", style: "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)" });

  function draw() {
    controls.forEach((control) => control.show());
    const at = controls.reduce((place, control, i) => place * knobs[i].labels.length + control.at(), 0);
    const top = Math.max(...values[at].map(sum), ...points[at].map((one) => sum(one || []))) * 1.02 || 1;
    const lines = ticks(top).map((value) => {
      const node = make("div", { class: "tick" }, make("span", {}, size(value)));
      node.style.bottom = `${(100 * value) / top}%`;
      return node;
    });
    plot.replaceChildren(...lines, ...values[at].map((one, i) => bar(one, points[at][i], top)));
    const told = (one) => parts.map(([letter], k) => `${letter} ${size(one[k])}`).join(", ");
    words.textContent = bars.map((name, i) =>
      `${name}: ${size(sum(values[at][i]))} (${told(values[at][i])})${points[at][i] ? `, ${mark} ${told(points[at][i])}` : ""}`).join("; ");
  }

  const controls = knobs.map((one) => knob(one, draw));
  // One way only: with its kernel gone, a model that is told something complains on the console.
  const told = () => {
    model.get("at").forEach((at, i) => controls[i].set(at));
    draw();
  };
  model.on("change:at", told);
  const diamond = points.some((row) => row.some(Boolean)) ? [make("span", {}, make("span", { class: "mark" }), mark)] : [];
  const root = make("div", { class: "d2b", role: "group", "data-lm-suppress-shortcuts": "true", "aria-label": model.get("title") },
    make("style", {}, CSS), make("h4", {}, model.get("title")), ...controls.map((control) => control.node), plot,
    make("div", { class: "names", "aria-hidden": "true" }, ...bars.map((name) => make("span", {}, name))),
    make("div", { class: "key" }, ...parts.map(([letter, name], k) => make("span", {}, make("i", { class: `p${k}` }), `${letter}  ${name}`)), ...diamond), words);
  root.addEventListener("keydown", (event) => event.stopPropagation()); // arrows are the slider's, not the notebook's
  el.append(root);
  told();
  return () => model.off("change:at", told);
}

export default { render };
