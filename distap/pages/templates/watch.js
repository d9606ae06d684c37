"use strict";

const EVERY = 2000; // milliseconds
const main = document.querySelector("main"), lost = document.getElementById("lost");
const parts = [...document.querySelectorAll("[data-mark]")];
let waiting = 0;

// Make `shown` what `fresh` is, and touch only what differs, so that places, focus and selections stay.
function turn(shown, fresh) {
  const nodes = [...fresh.childNodes];
  nodes.forEach((node, place) => {
    const old = shown.childNodes[place];
    if (!old) shown.append(node);
    else if (old.isEqualNode(node)) return;
    else if (old.nodeName !== node.nodeName) old.replaceWith(node);
    else if (old.nodeType !== Node.ELEMENT_NODE) old.data = node.data;
    else {
      for (const { name } of [...old.attributes]) {
        if (name !== "open" && !node.hasAttribute(name)) old.removeAttribute(name);
      }
      for (const { name, value } of node.attributes) {
        if (old.getAttribute(name) !== value) old.setAttribute(name, value);
      }
      turn(old, node);
    }
  });
  while (shown.childNodes.length > nodes.length) shown.lastChild.remove();
}

async function look() {
  clearTimeout(waiting);
  if (document.hidden) return;
  try {
    const have = new URLSearchParams(parts.map(part => [part.id, part.dataset.mark]));
    const answer = await fetch(`${main.dataset.parts}?${have}`, { signal: AbortSignal.timeout(30000) });
    if (!answer.ok) throw new Error(answer.status);
    const changed = await answer.json();
    const y = scrollY;
    for (const part of parts) {
      if (!(part.id in changed)) continue;
      const fresh = document.createElement("template");
      fresh.innerHTML = changed[part.id].html;
      turn(part, fresh.content);
      part.dataset.mark = changed[part.id].mark;
    }
    if (changed.title) document.title = changed.title.html;
    if (scrollY !== y && y <= document.documentElement.scrollHeight - innerHeight) scrollTo(scrollX, y);
    lost.hidden = true;
  } catch {
    lost.hidden = false;
  }
  clearTimeout(waiting);
  waiting = setTimeout(look, EVERY);
}

document.addEventListener("visibilitychange", look);
look();
