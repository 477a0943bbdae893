"use strict";
// Each chart follows pointer, touch and arrow keys; without a cursor it shows its default readout.
for (const chart of document.querySelectorAll(".chart")) {
  const { begin, at, texts, rest } = JSON.parse(chart.querySelector("script").textContent);
  const plot = chart.querySelector(".plot");
  const cursor = chart.querySelector(".cursor");
  const outs = [...chart.querySelectorAll("[data-out]")];
  let now = null;

  const say = (said) => outs.forEach((out) => { out.textContent = said[out.dataset.out]; });
  const ask = (n) => {
    now = Math.max(0, Math.min(begin.length - 1, n));
    cursor.style.left = `${100 * at[now]}%`;
    chart.classList.add("asked");
    say(texts[now]);
  };
  const leave = () => {
    now = null;
    chart.classList.remove("asked");
    say(rest);
  };
  const follow = (event) => {
    const box = plot.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    const next = begin.findIndex((from) => from > share);
    ask(next < 0 ? begin.length - 1 : next - 1);
  };
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 };
    if (event.key === "Escape") leave();
    else if (event.key in steps) ask((now ?? 0) + steps[event.key]);
    else return;
    event.preventDefault();
  });
}
