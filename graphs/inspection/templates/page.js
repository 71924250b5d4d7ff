"use strict";
const filter = document.getElementById("filter");
const found = document.getElementById("found");
const contents = document.getElementById("contents");
const sections = [...document.querySelectorAll("section")];
const items = sections.flatMap((section) => [...section.querySelectorAll(".item")]);
const texts = new Map();

for (const section of sections) {
  const entry = contents.appendChild(document.createElement("li"));
  const link = entry.appendChild(document.createElement("a"));
  link.href = "#" + section.id;
  link.textContent = section.dataset.title;
}

function textOf(item) {
  if (!texts.has(item)) texts.set(item, item.textContent.toLowerCase());
  return texts.get(item);
}

/* An item stays when it holds all the words, or when an item around it says them in its own line. */
function apply() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (item) => words.every((word) => textOf(item).includes(word));
  let count = 0;
  for (const item of items) {
    const line = item.querySelector(":scope > summary");
    const around = item.parentElement.closest(".item");
    const said = line !== null && words.every((word) => line.textContent.toLowerCase().includes(word));
    item.dataset.said = String(said || around?.dataset.said === "true");
    item.hidden = !(matches(item) || item.dataset.said === "true");
    if (!item.hidden && !around) count += 1;
  }
  sections.forEach((section, i) => {
    const own = [...section.querySelectorAll(".item")];
    contents.children[i].classList.toggle("none", own.length > 0 && own.every((item) => item.hidden));
  });
  found.textContent = words.length ? `${count} found` : "";
}

/* Open whatever is around the target of a link, so that it can be seen. */
function reveal() {
  const hash = decodeURIComponent(location.hash.slice(1));
  if (hash.startsWith("filter=")) {
    filter.value = hash.slice("filter=".length);
    apply();
    return;
  }
  const target = document.getElementById(hash);
  if (target === null) return;
  if (target.matches("details")) target.open = true;
  for (let around = target.closest("details"); around; around = around.parentElement.closest("details")) around.open = true;
  target.scrollIntoView();
}

filter.addEventListener("input", apply);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== filter) {
    event.preventDefault();
    filter.focus();
  } else if (event.key === "Escape" && document.activeElement === filter) {
    filter.value = "";
    apply();
  }
});
for (const button of document.querySelectorAll("button[data-open]")) {
  button.addEventListener("click", () => {
    for (const item of document.querySelectorAll("main details")) item.open = button.dataset.open === "true";
  });
}
const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const link = contents.children[sections.indexOf(entry.target)].firstChild;
      if (entry.isIntersecting) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  },
  { rootMargin: "-15% 0px -75% 0px" },
);
sections.forEach((section) => seen.observe(section));
addEventListener("hashchange", reveal);
reveal();
