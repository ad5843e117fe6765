// Draws the frames of one or two recorded steps and plays them. Needs no kernel: the frames are all here.

const CSS = `
.slc { --p:#9ecae8; --g:#f6cf7f; --o:#8fd3bd; --ink:#1a1a1a; --mute:#5a5a5a; --rule:#d0d0d0;
  background:#fff; color:var(--ink); font:13px/1.35 system-ui,sans-serif; padding:8px 10px; box-sizing:border-box; }
.slc:focus-visible, .slc :focus-visible { outline:3px solid #0072B2; outline-offset:1px; }
.slc .bar { display:flex; flex-wrap:wrap; gap:6px; align-items:center; }
.slc button, .slc select { font:inherit; color:var(--ink); background:#f3f3f3; border:1px solid #8a8a8a; border-radius:4px;
  padding:3px 9px; cursor:pointer; }
.slc button.play { min-width:5.4em; background:#dcecf7; font-weight:600; }
.slc input[type=range] { flex:1 1 140px; min-width:120px; accent-color:#0072B2; }
.slc .films { align-items:flex-start; display:flex; flex-wrap:wrap; gap:10px 22px; }
.slc .film { flex:1 1 400px; min-width:0; overflow-x:auto; container-type:inline-size; }
.slc h4 { margin:8px 0 0; font-size:14px; color:var(--ink); }
.slc .words { min-height:2.7em; margin:4px 0; padding:3px 8px; border-left:4px solid #0072B2; background:#f4f8fb; }
.slc .words small { color:var(--mute); }
.slc table { border-collapse:separate; border-spacing:3px; width:100%; table-layout:fixed; margin:0; font-size:11px; }
.slc th, .slc td { padding:0; text-align:center; vertical-align:top; font-weight:600; background:none; border:0; color:var(--ink); }
.slc th small { display:block; font-weight:400; font-size:10px; line-height:11px; color:var(--mute); }
.slc th { vertical-align:bottom; }
.slc th.row { width:50px; text-align:right; vertical-align:middle; padding-right:4px; }
.slc tr { background:none !important; }
.slc .net td { height:30px; border-radius:4px; border:1px solid transparent; line-height:14px; font-weight:600; overflow:hidden; }
.slc .net td.on { border:1px solid #D55E00; background:#fdeee4; }
.slc .net small { display:block; font-weight:400; color:var(--mute); white-space:nowrap; }
.slc td.cell { border:2px solid var(--rule); border-radius:5px; padding:2px; background:#fff; }
.slc td.cell.busy { border-color:#1a1a1a; }
.slc .doing { height:14px; line-height:14px; font-size:10.5px; text-align:left; padding-left:2px; font-weight:700; white-space:nowrap; overflow:hidden; }
.slc .kind { position:relative; height:16px; line-height:16px; margin-top:2px; text-align:left; border-radius:3px;
  border:1px solid #9a9a9a; overflow:hidden; font-weight:400; white-space:nowrap; }
.slc .kind i { position:absolute; inset:0 auto 0 0; display:block; }
.slc .kind span { position:relative; padding-left:3px; }
.slc .kind b { display:inline-block; width:1em; }
.slc .k0 { --c:var(--p); } .slc .k1 { --c:var(--g); } .slc .k2 { --c:var(--o); }
.slc .kind i { background:var(--c); }
.slc .kind.whole { border-color:#1a1a1a; }
.slc .kind.none { border-style:dotted; color:var(--mute); }
.slc .kind.gone { border-style:dashed; border-color:#1a1a1a; }
.slc .kind.stale i { background:radial-gradient(#9a9a9a 1px,transparent 1.2px) 0 0/5px 5px; }
.slc .kind.moving i { background:repeating-linear-gradient(115deg,var(--c) 0 6px,#fff 6px 11px); background-size:24.3px 100%; }
.slc .kind.moving { border-color:#D55E00; }
.slc .kind.moving span { background:#ffffffd0; border-radius:2px; padding-right:3px; }
.slc .curve { display:grid; grid-template-columns:50px 1fr 80px; align-items:center; gap:4px; font-size:10.5px; line-height:13px; height:32px; }
.slc .curve > b { text-align:right; }
.slc .curve svg { width:100%; height:28px; display:block; border-bottom:1px solid var(--rule); overflow:visible; }
.slc .legend { color:var(--mute); font-size:11.5px; margin-top:6px; display:flex; flex-wrap:wrap; gap:3px 14px; align-items:center; }
.slc .legend .kind { display:inline-block; width:30px; height:12px; vertical-align:-2px; margin:0 4px 0 0; }
@container (max-width:480px) { .slc .doing { font-size:9.5px; letter-spacing:-.3px; } .slc .kind { font-size:10.5px; } .slc table { border-spacing:2px; } .slc th.row { width:44px; } .slc .net td { height:44px; } }
@media (prefers-reduced-motion: no-preference) {
  .slc.playing .kind.moving i { animation:slc-flow 1s linear infinite; }
  @keyframes slc-flow { to { background-position:24.3px 0; } }
}
`;
const DOING = { F: "▶ forward", B: "◀ backward", O: "✎ update", ".": "" };
const SVG = "http://www.w3.org/2000/svg";

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
  for (const [unit, factor] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= factor) return `${(bytes / factor).toPrecision(3)} ${unit}`;
  }
  return `${bytes} B`;
}

// One recorded step: a grid of ranks and blocks, and a memory curve for each rank.
function film(data, top) {
  const columns = data.columns.length;
  const words = make("div", { class: "words" });
  const heads = data.columns.map((name, i) => make("th", { scope: "col" }, name, make("small", {}, data.notes[i])));
  const net = data.columns.map(() => make("td"));
  const cells = data.ranks.map((_, rank) => data.columns.map((_, column) => cell(data.kinds, offsets(data, rank, column))));
  const rows = cells.map((row, rank) =>
    make("tr", {}, make("th", { scope: "row", class: "row" }, data.ranks[rank]), ...row.map((c) => c.node)));
  const table = make("table", {},
    make("thead", {}, make("tr", {}, make("th", { class: "row" }), ...heads)),
    make("tbody", {}, make("tr", { class: "net" }, make("th", { scope: "row", class: "row" }, "network"), ...net), ...rows));
  table.setAttribute("aria-label", `What each rank holds of each block: ${data.title}`);
  const curves = data.curves.map((points, rank) => curve(points, data.ranks[rank], top, end(data)));
  const node = make("section", { class: "film", "aria-label": data.title }, make("h4", {}, data.title), words, table,
    ...curves.map((c) => c.node));
  const show = (number) => {
    const frame = data.frames[number];
    words.replaceChildren(make("b", {}, frame.words), make("br"),
      make("small", {}, `frame ${number + 1} of ${data.frames.length}, ${Math.max(...frame.ms).toFixed(1)} ms`));
    net.forEach((td, column) => {
      const here = frame.flights.filter((flight) => flight[1].includes(column));
      td.className = here.length ? "on" : "";
      td.replaceChildren(...here.slice(0, 1).flatMap(([name, , ranks]) =>
        [name, make("small", {}, ranks.length === data.ranks.length ? "all ranks" : `${ranks.length} of ${data.ranks.length} ranks`)]));
      td.title = here.map((flight) => flight[0]).join(", ");
    });
    cells.forEach((row, rank) => row.forEach((c, column) => {
      const at = rank * columns + column;
      c.show(frame.states.slice(at * 4, at * 4 + 4), data.table[frame.held[at]], data.whole[column]);
    }));
    curves.forEach((c, rank) => c.show(frame.ms[rank], frame.bytes[rank]));
  };
  return { node, show, words: (number) => data.frames[number].words };
}

function end(data) {
  return Math.max(...data.frames[data.frames.length - 1].ms, 1e-6);
}

// Where a rank's part is drawn: after the parts of the ranks before it, if together they make one whole.
function offsets(data, rank, column) {
  return data.kinds.map((_, k) => {
    const frame = data.frames[k ? data.frames.length - 1 : 0];
    const shares = data.ranks.map((_, r) => data.table[frame.held[r * data.columns.length + column]][k] / (data.whole[column][k] || 1));
    const sum = (many) => many.reduce((total, share) => total + share, 0);
    return sum(shares) > 0.9 && sum(shares) < 1.2 ? Math.min(1 - shares[rank], sum(shares.slice(0, rank))) : 0;
  });
}

function cell(kinds, places) {
  const doing = make("div", { class: "doing" });
  const bars = kinds.map((kind, k) => {
    const fill = make("i"), text = make("span");
    return { node: make("div", { class: `kind k${k}` }, fill, text), fill, text };
  });
  const node = make("td", { class: "cell" }, doing, ...bars.map((bar) => bar.node));
  let shown = "";
  const show = (state, held, whole) => {
    const key = state + held;
    if (key === shown) return;
    shown = key;
    doing.textContent = DOING[state[3]];
    node.classList.toggle("busy", state[3] !== ".");
    bars.forEach((bar, k) => {
      const [label, style] = kinds[k].states[state[k]];
      const share = whole[k] ? Math.min(1, held[k] / whole[k]) : 0;
      bar.node.className = `kind k${k} ${style}`;
      bar.fill.style.width = `${style === "none" ? 0 : style === "moving" || style === "whole" ? 100 : 100 * share}%`;
      bar.fill.style.left = `${style === "part" || style === "gone" ? 100 * places[k] : 0}%`;
      bar.text.replaceChildren(make("b", {}, kinds[k].letter), label);
      bar.node.title = `${kinds[k].name}: ${label}, ${size(held[k])} of ${size(whole[k])}`;
    });
  };
  return { node, show };
}

function curve(points, name, top, width) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 1000 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const peak = Math.max(0, ...points.map((point) => point[1]));
  svg.setAttribute("aria-label", `memory of ${name} in this step, peak ${size(peak)}`);
  const first = points.length ? points[0][0] : 0;
  const x = (ms) => (1000 * ms) / width, y = (bytes) => 100 - (94 * bytes) / top;
  const steps = points.map(([ms, bytes], i) => `${i ? `H${x(ms).toFixed(1)}` : `M${x(first).toFixed(1)} ${y(bytes).toFixed(1)}`}V${y(bytes).toFixed(1)}`).join("");
  const draw = (d, fill, stroke, thick) => {
    const path = document.createElementNS(SVG, "path");
    for (const [key, value] of Object.entries({ d, fill, stroke, "stroke-width": thick, "vector-effect": "non-scaling-stroke" })) path.setAttribute(key, value);
    svg.append(path);
    return path;
  };
  if (points.length) {
    draw(`${steps}V100H${x(first).toFixed(1)}Z`, "#e8eef3", "none", 0);
    draw(steps, "none", "#5a5a5a", 1.2);
  }
  const cursor = draw("", "none", "#D55E00", 2);
  const now = make("span");
  const node = make("div", { class: "curve" }, make("b", {}, name), svg, now);
  const show = (ms, bytes) => {
    cursor.setAttribute("d", `M${x(ms).toFixed(1)} -4V100`);
    if (bytes === null || !points.length) now.textContent = "no memory curve";
    else now.replaceChildren(make("b", {}, size(bytes)), make("br"), `peak ${size(peak)}`);
  };
  return { node, show };
}

function legend(kinds) {
  const swatch = (style, share, text, k = 0) => {
    const fill = make("i");
    fill.style.width = `${share}%`;
    return make("span", {}, make("span", { class: `kind k${k} ${style}`, "aria-hidden": "true" }, fill), text);
  };
  return make("div", { class: "legend" },
    ...kinds.map((kind, k) => swatch("whole", 100, `${kind.letter}: ${kind.name}`, k)),
    swatch("part", 30, "one part, another on each rank"), swatch("moving", 100, "on its way"), swatch("gone", 30, "freed"), swatch("stale", 100, "old, memory kept"), swatch("none", 0, "not there"));
}

function render({ model, el }) {
  const films = model.get("films"), steps = model.get("steps");
  const top = Math.max(1, ...films.flatMap((data) => data.curves.flatMap((points) => points.map((point) => point[1]))));
  const shown = films.map((data) => film(data, top));
  const root = make("div", { class: "slc", tabindex: "0", role: "group", "data-lm-suppress-shortcuts": "true",
    "aria-label": `Player: ${films.map((data) => data.title).join(" beside ")}. Space plays, arrows step, Home and End jump.` });
  const button = (label, name, act, kind = "") => {
    const node = make("button", { type: "button", "aria-label": name, title: name, class: kind }, label);
    node.addEventListener("click", act);
    return node;
  };
  let step = -1, timer = 0;
  const last = steps.length - 1;
  const play = button("▶ play", "play", () => (timer ? pause() : start()), "play");
  const slider = make("input", { type: "range", min: 0, max: last, step: 1, "aria-label": "frame" });
  const speed = make("select", { "aria-label": "speed" },
    ...[["0.5", "½×"], ["1", "1×"], ["2", "2×"], ["4", "4×"]].map(([value, text]) => make("option", { value }, text)));
  speed.value = "1";
  const spoken = make("span", { role: "status", "aria-live": "polite", style: "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)" });

  const words = () => shown.map((one, i) => one.words(steps[step][i])).join("; ");
  const speak = () => { spoken.textContent = words(); };

  function show(number) {
    number = Math.max(0, Math.min(last, number));
    if (number !== step) {
      step = number;
      shown.forEach((one, i) => one.show(steps[step][i]));
      slider.value = step;
      slider.setAttribute("aria-valuetext", `${step + 1} of ${last + 1}: ${words()}`);
      if (!timer) speak(); // not each frame while it plays
    }
  }
  function tick() {
    show(step + 1);
    timer = 0;
    if (step < last) wait();
    else pause();
  }
  function wait() {
    timer = setTimeout(tick, 700 / Number(speed.value));
  }
  function start() {
    if (step === last) show(0);
    wait();
    play.textContent = "❚❚ pause";
    play.setAttribute("aria-label", "pause");
    root.classList.add("playing");
  }
  function pause() {
    clearTimeout(timer);
    timer = 0;
    play.textContent = "▶ play";
    play.setAttribute("aria-label", "play");
    root.classList.remove("playing");
    speak();
  }
  function go(number) {
    if (timer) pause();
    show(number);
  }

  slider.addEventListener("input", () => { if (timer) pause(); show(Number(slider.value)); });
  root.addEventListener("keydown", (event) => {
    const tag = event.target.tagName;
    if (tag === "SELECT" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === " " && tag === "BUTTON") return;
    const act = { " ": () => (timer ? pause() : start()), ArrowRight: () => go(step + 1), ArrowLeft: () => go(step - 1),
      Home: () => go(0), End: () => go(last) }[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  });
  // One way only: with its kernel gone, a model that is told something complains on the console.
  const told = () => go(model.get("step"));
  model.on("change:step", told);

  root.append(make("style", {}, CSS),
    make("div", { class: "bar" }, play, button("|◀", "first frame", () => go(0)), button("◀", "one frame back", () => go(step - 1)),
      button("▶", "one frame on", () => go(step + 1)), slider, make("label", {}, "speed ", speed)),
    make("div", { class: "films" }, ...shown.map((one) => one.node)), legend(films[0].kinds), spoken);
  el.append(root);
  show(model.get("step"));
  return () => {
    clearTimeout(timer);
    model.off("change:step", told);
  };
}

export default { render };
