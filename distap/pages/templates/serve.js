"use strict";

const at = id => document.getElementById(id);
const title = document.title;
const searches = new Map(); // since the page was loaded, by the history's state: what was asked, and the hits
let asked = 0; // an answer that comes after a newer question counts no more
let current = null; // the search that was asked for last

function tell(problem) {
  at("error").textContent = problem;
  at("error").hidden = !problem;
}

function wanted() {
  const k = Number(at("k").value);
  if (!Number.isInteger(k) || k < 1) throw new Error("Images to find: give a whole number from 1.");
  return k;
}

// Conditions have semicolons between them. An index without columns has neither field.
function filters() {
  return { where: at("where")?.value ?? "", group: at("group")?.value ?? "" };
}

function limits({ k, where, group }) {
  const conditions = where.split(";").map(text => text.trim()).filter(text => text);
  return [["k", k], ...conditions.map(text => ["where", text]), ...(group ? [["group", group]] : [])];
}

// The address of a search below that of this page. An image is not in it, only the name of its file.
function address(query) {
  const { key, file } = query;
  return `?${new URLSearchParams([key === undefined ? ["image", file.name] : ["key", key], ...limits(query)])}`;
}

function request(query) {
  const { key, file } = query;
  const address = asked => `${at("form").action}?${new URLSearchParams(asked)}`;
  if (key !== undefined) return [address([["key", key], ...limits(query)]), {}];
  const body = new FormData();
  body.append("image", file, "image");
  return [address(limits(query)), { method: "POST", body }];
}

// Ask for a search, and give it an address of its own unless it is `restored` from one.
async function search(query, restored = false) {
  const mine = ++asked;
  current = query;
  choose(query.file);
  tell("");
  at("status").textContent = "Searching";
  document.body.classList.add("busy");
  at("send").disabled = true;
  try {
    const answer = await fetch(...request(query));
    const content = await answer.json().catch(() => null);
    if (mine !== asked) return;
    if (!answer.ok) throw new Error(content?.error?.message ?? `The server answered with status ${answer.status}.`);
    const found = { query, hits: content.hits }, before = searches.get(history.state)?.query ?? {};
    const isSame = ["key", "file", "k", "where", "group"].every(name => before[name] === query[name]);
    const state = `${performance.timeOrigin} ${mine}`; // no other loading of the page has it
    searches.set(state, found);
    history[restored || isSame ? "replaceState" : "pushState"](state, "", address(query));
    show(found);
    at("found").focus();
  } catch (error) {
    if (mine !== asked) return;
    at("status").textContent = "";
    at("results").hidden = true; // they are not of the image that is chosen now
    const lost = error instanceof TypeError;
    tell(lost ? "The server cannot be reached: try again in a moment." : error.message);
  } finally {
    if (mine === asked) idle();
  }
}

function idle() {
  document.body.classList.remove("busy");
  at("send").disabled = false;
}

function again(query) {
  try { search({ ...query, k: wanted(), ...filters() }); } catch (error) { tell(error.message); }
}

// Show the file that is searched for, if it is one, as the file that is chosen.
function choose(file) {
  const preview = at("preview"), files = new DataTransfer();
  if (preview.src) URL.revokeObjectURL(preview.src);
  preview.hidden = true;
  preview.removeAttribute("src");
  if (file) {
    files.items.add(file);
    preview.onload = () => { preview.hidden = false; };
    preview.src = URL.createObjectURL(file);
  }
  at("image").files = files.files;
}

function show({ query, hits }) {
  const name = query.key ?? query.file.name;
  at("hits").replaceChildren(...hits.map(hit => card(hit, query)));
  at("found").textContent = hits.length ? `Most similar to ${name}` : "Nothing was found";
  at("status").textContent = `${hits.length} images found`;
  at("results").hidden = false;
  document.title = `${name} - ${title}`;
}

function card(hit, query) {
  const item = at("hit").content.cloneNode(true), picture = item.querySelector("img");
  picture.alt = `${hit.class || "image"}, ${hit.key}`;
  picture.onerror = () => { picture.parentNode.textContent = "no picture"; };
  // Of the path only the end, since a proxy may show this server below one that it does not know.
  if (!hit.picture) picture.parentNode.textContent = "no picture";
  else picture.src = at("form").action.replace(/api\/search$/, `images/${hit.picture.split("/").pop()}`);
  item.querySelector("b").textContent = `${hit.rank}. similarity ${hit.similarity.toFixed(3)}`;
  item.querySelector(".class").textContent = hit.class;
  item.querySelector(".key").textContent = hit.key;
  item.querySelector(".columns").textContent = Object.entries(hit.columns ?? {}).map(cell => cell.join(": ")).join(", ");
  const more = item.querySelector(".more");
  more.setAttribute("aria-label", `Search for images similar to ${hit.key}`);
  more.href = address({ ...query, file: undefined, key: hit.key });
  more.onclick = event => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // it opens elsewhere
    event.preventDefault();
    again({ key: hit.key });
  };
  return item;
}

// Return to what the address says: hits that are known from this visit, or a search by key; else to the beginning.
function restore() {
  const asks = new URLSearchParams(location.search), k = Number(asks.get("k")), known = searches.get(history.state);
  asked++;
  idle();
  tell("");
  current = known?.query ?? null;
  at("k").value = Number.isInteger(k) && k > 0 ? k : at("k").defaultValue;
  const { where, group } = known?.query ?? { where: asks.getAll("where").join("; "), group: asks.get("group") ?? "" };
  if (at("where")) at("where").value = where;
  if (at("group")) at("group").value = group;
  if (known) {
    choose(known.query.file);
    return show(known);
  }
  if (asks.has("key")) return search({ key: asks.get("key"), k: wanted(), ...filters() }, true);
  choose(null);
  at("results").hidden = true;
  at("status").textContent = "";
  document.title = title;
  if (asks.has("image")) tell(`Choose ${asks.get("image")} again: this page forgets images when it is loaded anew.`);
}

function take(files) {
  if (files.length) again({ file: files[0] });
}

at("image").addEventListener("change", event => take(event.target.files));
for (const name of ["k", "where", "group"]) {
  at(name)?.addEventListener("change", () => { if (current) again(current); });
}

at("form").addEventListener("submit", event => {
  event.preventDefault();
  const file = at("image").files[0];
  if (file || current) return again(file ? { file } : current);
  tell("Choose an image first.");
  at("image").focus();
});

for (const name of ["dragenter", "dragover"]) {
  at("drop").addEventListener(name, event => { event.preventDefault(); at("drop").classList.add("over"); });
}
for (const name of ["dragleave", "drop"]) {
  at("drop").addEventListener(name, event => { event.preventDefault(); at("drop").classList.remove("over"); });
}
at("drop").addEventListener("drop", event => take(event.dataTransfer.files));
document.addEventListener("paste", event => take(event.clipboardData.files));
addEventListener("popstate", restore);
restore();
