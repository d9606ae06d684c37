"use strict";

const at = id => document.getElementById(id);
let asked = 0; // an answer that comes after a newer question counts no more

function tell(problem) {
  at("error").textContent = problem;
  at("error").hidden = !problem;
}

function chosen(file) {
  const preview = at("preview");
  if (preview.src) URL.revokeObjectURL(preview.src);
  preview.hidden = true;
  if (!file) return;
  preview.onload = () => { preview.hidden = false; };
  preview.onerror = () => { preview.hidden = true; };
  preview.src = URL.createObjectURL(file);
}

function take(files) {
  if (!files.length) return;
  at("image").files = files;
  chosen(files[0]);
}

function wanted() {
  const k = Number(at("k").value);
  if (!Number.isInteger(k) || k < 1) throw new Error("Images to find: give a whole number from 1.");
  return k;
}

async function ask(path, options, title) {
  const mine = ++asked;
  tell("");
  at("status").textContent = "Searching";
  document.body.classList.add("busy");
  at("send").disabled = true;
  try {
    const answer = await fetch(path, options);
    const content = await answer.json().catch(() => null);
    if (mine !== asked) return;
    if (!answer.ok) throw new Error(content?.error?.message ?? `The server answered with status ${answer.status}.`);
    show(content.hits, title);
  } catch (error) {
    if (mine !== asked) return;
    at("status").textContent = "";
    const lost = error instanceof TypeError;
    tell(lost ? "The server cannot be reached: try again in a moment." : error.message);
  } finally {
    if (mine === asked) {
      document.body.classList.remove("busy");
      at("send").disabled = false;
    }
  }
}

function show(hits, title) {
  at("hits").replaceChildren(...hits.map(card));
  at("found").textContent = hits.length ? title : "Nothing was found";
  at("status").textContent = `${hits.length} images found`;
  at("results").hidden = false;
  at("found").focus();
}

function card(hit) {
  const item = at("hit").content.cloneNode(true), picture = item.querySelector("img");
  picture.alt = `${hit.class || "image"}, ${hit.key}`;
  picture.onerror = () => { picture.parentNode.textContent = "no picture"; };
  picture.src = hit.picture;
  item.querySelector("b").textContent = `${hit.rank}. similarity ${hit.similarity.toFixed(3)}`;
  item.querySelector(".class").textContent = hit.class;
  item.querySelector(".key").textContent = hit.key;
  const more = item.querySelector(".more");
  more.setAttribute("aria-label", `Search for images similar to ${hit.key}`);
  more.onclick = () => {
    let k;
    try { k = wanted(); } catch (error) { return tell(error.message); }
    ask(`${at("form").action}?${new URLSearchParams({ key: hit.key, k })}`, {}, `Most similar to ${hit.key}`);
  };
  return item;
}

at("image").addEventListener("change", event => chosen(event.target.files[0]));

at("form").addEventListener("submit", event => {
  event.preventDefault();
  const file = at("image").files[0];
  if (!file) {
    tell("Choose an image first.");
    at("image").focus();
    return;
  }
  const form = new FormData();
  try { form.append("k", wanted()); } catch (error) { return tell(error.message); }
  form.append("image", file, "image");
  ask(at("form").action, { method: "POST", body: form }, "Most similar to your image");
});

for (const name of ["dragenter", "dragover"]) {
  at("drop").addEventListener(name, event => { event.preventDefault(); at("drop").classList.add("over"); });
}
for (const name of ["dragleave", "drop"]) {
  at("drop").addEventListener(name, event => { event.preventDefault(); at("drop").classList.remove("over"); });
}
at("drop").addEventListener("drop", event => take(event.dataTransfer.files));
document.addEventListener("paste", event => take(event.clipboardData.files));
