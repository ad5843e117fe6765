// Puts widgets that need no kernel into their places; where one fails, its picture stays. MODULES are written above.

for (const place of document.querySelectorAll(".player")) {
  const state = JSON.parse(place.querySelector("script").textContent);
  const model = { get: (name) => state[name], set() {}, save_changes() {}, on() {}, off() {} };
  // As data: a page that was opened from disk may not import a file beside it.
  import(`data:text/javascript;charset=utf-8,${encodeURIComponent(MODULES[place.dataset.module])}`).then((module) => {
    const stage = document.createElement("div");
    stage.style.cssText = "all: initial; display: block"; // of the page's style nothing comes in
    module.default.render({ model, el: stage.attachShadow({ mode: "open" }) });
    place.querySelector("img").replaceWith(stage);
  });
}
