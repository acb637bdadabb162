"use strict";
/* Texts of others (names of models, tenants and files, messages, answers) enter the page as text nodes only. */
const byId = (id) => document.getElementById(id);
const BASE = new URL(".", location.href.split("#")[0]).href.replace(/\/$/, "").replace(/'/g, "%27");
const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const parsed = (text, other) => { try { return JSON.parse(text); } catch { return other; } };
const el = (tag, properties, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 3});
const number = (value) => value < 10 && value % 1 ? value.toFixed(1) : compact.format(Math.round(value || 0));
const count = (value, noun) => `${value.toLocaleString("en")} ${noun}${value === 1 ? "" : "s"}`;
const percent = (value) => `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)} %`;
const moment = (at) => new Date(1000 * at).toLocaleString("en-GB", {dateStyle: "medium", timeStyle: "short"});
const bytes = (value) => value < 1e3 ? `${value} B` : value < 1e6 ? `${(value / 1e3).toFixed(1)} kB` : `${(value / 1e6).toFixed(1)} MB`;
const joined = (...parts) => parts.filter(Boolean).join(" · ");
const seconds = (value) => {
  const [size, unit] = [[86400, "days", 2], [3600, "h", 2], [60, "min", 5]].find(([size, , most]) => value >= most * size) || [1, "s"];
  if (size > 1) return `${number(Math.round(10 * value / size) / 10)} ${unit}`;
  if (value >= 1) return `${value.toFixed(value < 100 ? 1 : 0)} s`;
  return value >= 0.001 ? `${Math.round(1000 * value)} ms` : value > 0 ? "< 1 ms" : "0 ms";
};

/* The key, and requests to the service */

let key = sessionStorage.getItem("key") || "";
const headers = (more) => ({accept: "application/json", ...(key && {authorization: `Bearer ${key}`}), ...more});
const problem = (status, message, retryAfter = 0) => Object.assign(new Error(message), {status, retryAfter});

function problemOf(status, text, header) {
  const after = Math.max(0, Number(header) || 0), told = parsed(text)?.error?.message;
  const message = typeof told === "string" ? told.slice(0, 2000) : `The service answers ${status}.`;
  return problem(status, status !== 429 ? message : `${message} Try again ${after ? `in ${seconds(after)}` : "later"}.`, after);
}

async function ask(path, {body, signal, method = body ? "POST" : "GET"} = {}) {
  const sent = key, more = body && {"content-type": "application/json"};
  const answer = await fetch(path, {method, signal, cache: "no-store", body: body && JSON.stringify(body), headers: headers(more)}).catch((error) => {
    throw signal?.aborted ? error : problem(0, "The service does not answer.");
  });
  if (answer.ok) return answer;
  const refused = problemOf(answer.status, await answer.text().catch(() => ""), answer.headers.get("retry-after"));
  if (refused.status === 401 && sent === key) needKey(refused.message);
  throw refused;
}

const askJSON = async (path, options) => (await ask(path, options)).json();

/* Yield the lines of a stream of bytes; a line beyond `most` characters ends it with an error. */
async function* linesOf(stream, most = Infinity) {
  const reader = stream.pipeThrough(new TextDecoderStream("utf-8", {fatal: true})).getReader();
  for (let rest = "", ended = false; !ended;) {
    const {done, value = ""} = await reader.read(), parts = (rest + value).split("\n");
    ended = done;
    rest = done ? "" : parts.pop();
    yield* parts;
    if (rest.length > most) throw new RangeError();
  }
}

function showKey(open) {
  byId("key-form").hidden = !open;
  byId("forget").hidden = !key;
  byId("key-button").ariaExpanded = String(open);
  put(byId("key-button"), key ? "API key: set" : "API key");
  if (open) byId("key").focus();
}

function setKey(value) {
  key = value;
  if (key) sessionStorage.setItem("key", key); else sessionStorage.removeItem("key");
  models = admin = lastAt = null;
  usageAsked = "";
  for (const views of [modelViews, batchViews]) views.forEach((one) => one.root.remove()), views.clear();
  for (const id of ["own-note", "own", "usage", "all-keys"]) byId(id).replaceChildren();
  byId("admin").hidden = true;
  writeCode();
}

function needKey(message) {
  put(byId("key-error"), key ? `${message} Enter another key.` : "This service asks for an API key.");
  setKey("");
  showKey(true);
}

byId("key-button").onclick = () => showKey(byId("key-form").hidden);
byId("forget").onclick = () => { setKey(""); showKey(true); start(); };
byId("key-form").onsubmit = (event) => {
  event.preventDefault();
  put(byId("key-error"), "");
  setKey(byId("key").value.trim());
  byId("key").value = "";
  showKey(false);
  start();
};

/* The views. The shown view asks one question at a time, and none while the page is hidden. A load returns the
   milliseconds from its begin to the next load; Infinity: nothing changes by itself. */

const VIEWS = {try: ["Try", loadModels], batches: ["Batches", loadBatches], live: ["Live", loadLive], keys: ["Keys and use", loadUse]};
const MOST_PAUSE_S = 30;
let view = "try", timer = 0, asking = null, failures = 0, lastAt = null;

function start() {
  clearTimeout(timer);
  asking?.abort();
  asking = null;
  if (!document.hidden) tick();
}

async function tick() {
  const own = asking = new AbortController(), began = performance.now();
  let pause;
  try {
    pause = await VIEWS[view][1](own.signal) - (performance.now() - began);
    if (own !== asking) return;
    [failures, lastAt, byId("notice").hidden] = [0, new Date(), true];
    put(byId("notice-text"), "");
    tell(view === "live" ? "live" : "", "live");
  } catch (error) {
    if (own !== asking) return;
    if (error.status === 401) return tell("waits for a key", "");
    if (!("status" in error)) console.error(error);
    pause = 1000 * Math.max(Math.min(MOST_PAUSE_S, 2 ** failures++), error.retryAfter || 0);
    byId("notice").hidden = false;
    // Only the first part is read out: it stays the same while the service is away.
    put(byId("notice-text"), error.message + (lastAt ? ` The page shows what was there at ${lastAt.toLocaleTimeString("en-GB")}.` : ""));
    put(byId("pause"), `The page asks again in ${seconds(pause / 1000)}.`);
    tell(error.status ? `error ${error.status}` : "no answer", "lost");
  }
  asking = null;
  if (pause < Infinity) timer = setTimeout(tick, Math.max(0, pause));
}

function tell(text, kind) {
  put(byId("state"), text);
  byId("state").className = text && kind;
}

function route() {
  const wanted = location.hash.slice(1);
  view = Object.hasOwn(VIEWS, wanted) ? wanted : "try";
  for (const name of Object.keys(VIEWS)) byId(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) link.ariaCurrent = link.hash === `#${view}` ? "page" : null;
  document.title = `saturate · ${VIEWS[view][0]}`;
  [failures, lastAt, byId("notice").hidden] = [0, null, true];
  tell("", "");
  start();
}

/* Tables keep their rows, so that the focus, a selection and a screen reader stay where they are. */

const STEP = 20, MOST_ROWS = 500;

class Table {
  constructor(caption) {
    Object.assign(this, {most: STEP, head: el("tr"), body: el("tbody")});
    const show = () => { this.most = Math.min(MOST_ROWS, this.most + 5 * STEP); this.update(this.columns, this.rows); };
    this.more = el("button", {type: "button", className: "more", onclick: show});
    const table = el("table", {}, el("caption", {}, caption), el("thead", {}, this.head), this.body);
    this.root = el("div", {className: "table", tabIndex: 0, role: "region", ariaLabel: caption, hidden: true}, table, this.more);
  }

  /* A row has cells; a cell is a text, or [text, share that a bar shows]. */
  update(columns, rows) {
    if (this.columns?.join() !== columns.join()) {
      this.head.replaceChildren(...columns.map((name) => el("th", {scope: "col"}, name)));
      this.body.replaceChildren();
    }
    Object.assign(this, {columns, rows});
    const shown = rows.slice(0, this.most), rest = rows.length - shown.length;
    const cell = (_, place) => place ? el("td", {}, el("span")) : el("th", {scope: "row"}, el("span"));
    while (this.body.rows.length > shown.length) this.body.lastChild.remove();
    shown.forEach((cells, index) => {
      const row = this.body.rows[index] || this.body.appendChild(el("tr", {}, ...columns.map(cell)));
      cells.forEach((value, place) => {
        const [text, share] = [value].flat(), where = row.children[place];
        put(where.firstChild, String(text));
        if (!place) where.title = text;
        if (share === undefined) return where.children[1]?.remove();
        const bar = where.children[1] || where.appendChild(el("span", {className: "bar"}, el("span")));
        bar.classList.toggle("full", share >= 0.95);
        bar.firstChild.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
      });
    });
    [this.root.hidden, this.more.hidden, this.more.disabled] = [!rows.length, !rest, this.most >= MOST_ROWS];
    put(this.more, `${rest} more${this.more.disabled ? ": use the filter" : ""}`);
  }
}

/* Try */

const CHAT = "/v1/chat/completions";
const FORMS = {
  [CHAT]: ["Chat", {text: "Message"}],
  "/generate": ["Completions of prompts", {prompts: "Prompts, one per line"}],
  "/v1/embeddings": ["Embeddings", {input: "Texts, one per line"}],
  "/v1/rerank": ["Rerank", {query: "Query", documents: "Documents, one per line"}],
  "/v1/score": ["Score", {text_1: "Text", text_2: "Texts to compare it with, one per line"}],
  "/v1/classify": ["Classify", {input: "Texts, one per line"}],
  "/process": ["Process records", {records: "Records, one per line: JSON, or else a text"}],
};
const EXAMPLES = {text: "What is 47+28?", query: "a pet", text_1: "a pet"};
const NUMBERS = ["temperature", "max_tokens", "top_p", "seed"];
const MOST_SHOWN = 10, MOST_TEXT = 20000;
const chat = [];
let models = null, answering = null, language = "curl";
const path = () => byId("route").value;

async function loadModels(signal) {
  if (models) return Infinity;
  const before = byId("model").value;
  models = (await askJSON("v1/models", {signal})).data;
  byId("model").replaceChildren(...models.map(({id}) => el("option", {value: id, selected: id === before}, id)));
  showModel();
  return Infinity;
}

function showModel() {
  const model = models.find(({id}) => id === byId("model").value), before = path();
  // Few language models embed, and vLLM decides which: a model that generates is asked for texts only.
  const may = model?.routes.includes("/generate") ? [CHAT, "/generate"] : model?.routes || [];
  const routes = Object.keys(FORMS).filter((name) => may.includes(name));
  byId("route").replaceChildren(...routes.map((name) => el("option", {value: name, selected: name === before}, FORMS[name][0])));
  byId("route-box").hidden = routes.length < 2;
  put(byId("model-note"), !model ? "This key may use no model." : joined(
    model.max_model_len && `context ${count(model.max_model_len, "token")}`, model.parent && `adapter of ${model.parent}`,
    model.kind === "function" && "function", model.simulated && `simulated device ${model.simulated}`));
  showRoute();
}

function showRoute() {
  const chats = path() === CHAT, old = [...byId("fields").querySelectorAll("textarea")], rows = (name) => name === "text" || !EXAMPLES[name] ? 3 : 1;
  byId("fields").replaceChildren(...Object.entries(FORMS[path()]?.[1] || {}).flatMap(([name, label]) => {
    const value = old.find((one) => one.name === name)?.value || "";
    return [el("label", {htmlFor: `field-${name}`}, label), el("textarea", {id: `field-${name}`, name, value, rows: rows(name), required: true})];
  }));
  byId("settings").hidden = byId("numbers").disabled = !chats && path() !== "/generate";
  byId("system").disabled = byId("log").hidden = byId("hint").hidden = !chats;
  byId("result").replaceChildren();
  put(byId("ask-error"), "");
  showButtons();
}

function showButtons() {
  byId("stop").hidden = !answering;
  byId("send").disabled = Boolean(answering) || !path();
  byId("regenerate").hidden = byId("clear").hidden = path() !== CHAT || Boolean(answering) || !chat.length;
  writeCode();
}

function field(name) {
  const text = byId(`field-${name}`)?.value.trim() || "", lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  return EXAMPLES[name] ? text : name === "records" ? lines.map((line) => parsed(line, line)) : lines;
}

/* Return the body of the request; a sample has examples in place of empty fields. */
function bodyOf(sample = false) {
  const settings = {}, stop = byId("stop-texts").value.split("\n").filter(Boolean), model = byId("model").value;
  for (const name of NUMBERS) if (byId(name).value && byId(name).checkValidity()) settings[name] = Number(byId(name).value);
  if (stop.length) settings.stop = stop;
  if (byId("tier").value) settings.service_tier = byId("tier").value;
  const given = Object.fromEntries(Object.keys(FORMS[path()][1]).map((name) => [name, field(name)]));
  if (sample && !(path() === CHAT && chat.length))
    for (const name of Object.keys(given)) if (!given[name].length) given[name] = EXAMPLES[name] || [EXAMPLES.text];
  if (path() !== CHAT) return {model, ...given, ...(path() === "/generate" && settings)};
  const system = byId("system").value.trim() ? [{role: "system", content: byId("system").value}] : [];
  const said = [...chat, ...(sample && given.text ? [{role: "user", content: given.text}] : [])].map(({role, content}) => ({role, content}));
  return {model, messages: [...system, ...said], ...settings, stream: true, stream_options: {include_usage: true}};
}

byId("ask").onsubmit = (event) => {
  event.preventDefault();
  const empty = Object.keys(FORMS[path()][1]).find((name) => !field(name).length);
  if (answering || empty) return empty && byId(`field-${empty}`).focus();
  if (path() !== CHAT) return run(askOnce);
  addMessage("user", "You", field("text"));
  byId("field-text").value = "";
  run(answer);
};
// The browser checks the settings with the form, and can't point at what is folded up.
byId("settings").addEventListener("invalid", () => { byId("settings").open = true; }, true);

/* Run a request that Stop may end, and show why it failed. */
async function run(work) {
  const own = answering = new AbortController();
  put(byId("ask-error"), "");
  showButtons();
  await work(own.signal).catch((error) => {
    if (!own.signal.aborted) put(byId("ask-error"), error.message);
    if (error.status === 0) models = null, start();
  });
  answering = null;
  showButtons();
}

function addMessage(role, who, content = "") {
  const message = {role, content, node: document.createTextNode(content), meta: el("p", {className: "soft"})};
  message.root = el("article", {className: `message ${role}`}, el("h2", {}, who), el("div", {className: "text"}, message.node), message.meta);
  chat.push(message);
  byId("log").append(message.root);
  message.root.scrollIntoView({block: "nearest"});
  return message;
}

function drop(message) {
  chat.splice(chat.indexOf(message), 1);
  message.root.remove();
}

async function answer(signal) {
  const body = bodyOf(), message = addMessage("assistant", body.model), began = performance.now();
  let first = 0, last = 0, usage = null, end = "", thought = null;
  const write = (node, text) => { last = performance.now(); first ||= last; node.appendData(text); };
  put(message.meta, "waiting");
  put(byId("said"), "The model answers.");
  try {
    const {body: stream} = await ask(CHAT.slice(1), {body, signal});
    for await (const line of linesOf(stream)) {
      const event = line.startsWith("data:") && parsed(line.slice(5)), choice = event?.choices?.[0], thinking = choice?.delta?.reasoning;
      if (!event) continue;
      if (event.error) throw problem(500, `The answer broke off: ${event.error.message}`);
      usage = event.usage || usage;
      end = choice?.finish_reason || end;
      if (thinking && !thought) {
        thought = document.createTextNode("");
        const shown = el("details", {open: true}, el("summary", {}, "Reasoning"), el("div", {className: "text"}, thought));
        message.root.firstChild.after(shown);
      }
      if (thinking) write(thought, thinking);
      if (choice?.delta?.content) write(message.node, choice.delta.content);
    }
  } catch (error) {
    end = signal.aborted ? "stopped" : "failed";
    throw signal.aborted || "status" in error ? error : problem(0, "The answer broke off: the connection is lost.");
  } finally {
    message.content = message.node.data;
    const cached = usage?.prompt_tokens_details?.cached_tokens, out = usage?.completion_tokens;
    put(message.meta, joined(first && `TTFT ${seconds((first - began) / 1000)}`,
      out > 1 && last > first && `${number((out - 1) / (last - first) * 1000)} tokens/s`,
      usage && `${usage.prompt_tokens} tokens in${cached ? ` (${cached} cached)` : ""}, ${out} out`, end && `end: ${end}`));
    put(byId("said"), `${end === "stopped" ? "Stopped" : "Answer"}: ${message.content.slice(0, 500)}`);
    if (end === "failed" && !message.content) drop(message);
  }
}

async function askOnce(signal) {
  const body = bodyOf(), began = performance.now(), found = await askJSON(path().slice(1), {body, signal});
  const texts = body.documents || body.text_2 || body.input || body.prompts || body.records;
  const short = (value, most = 200) => (typeof value === "string" ? value : JSON.stringify(value) ?? "").slice(0, most);
  const vector = (values) => `${count(values.length, "number")}: ${values.slice(0, 5).map((value) => value.toFixed(4)).join(", ")}, …`;
  const shown = (found.data || found.results || []).slice(0, MOST_SHOWN).map((one, place) => {
    const text = short(texts[one?.index ?? place]), score = one?.relevance_score ?? one?.score;
    if (score !== undefined) return `${score.toFixed(4)}  ${text}`;
    return `${text} → ${Array.isArray(one?.embedding) ? vector(one.embedding) : short(one?.label ?? one, 500)}`;
  });
  const raw = JSON.stringify(found, null, 1), rest = raw.length - MOST_TEXT, took = `Answered in ${seconds((performance.now() - began) / 1000)}`;
  const cut = rest > 0 ? `${raw.slice(0, MOST_TEXT)}\n… ${count(rest, "character")} more` : raw;
  byId("result").replaceChildren(el("div", {className: "card"}, el("h2", {}, "Answer"),
    el("ul", {}, ...shown.map((text) => el("li", {className: "text"}, text))),
    el("p", {className: "soft"}, joined(took, found.usage?.prompt_tokens && `${found.usage.prompt_tokens} tokens in`)),
    el("details", {open: !shown.length}, el("summary", {}, "The raw answer"), el("pre", {tabIndex: 0, role: "region", ariaLabel: "The raw answer"}, cut))));
  put(byId("said"), `${took}. ${shown.slice(0, 3).join("; ").slice(0, 500)}`);
}

byId("stop").onclick = () => { answering?.abort(); byId("field-text")?.focus(); };
byId("regenerate").onclick = () => {
  while (chat.at(-1).role === "assistant") drop(chat.at(-1));
  byId("field-text").focus();
  run(answer);
};
byId("clear").onclick = () => {
  while (chat.length) drop(chat[0]);
  put(byId("said"), "The chat is cleared.");
  byId("field-text").focus();
  showButtons();
};
byId("fields").onkeydown = (event) => {
  if (event.target.name !== "text" || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
};
byId("model").onchange = showModel;
byId("route").onchange = showRoute;

/* The request as code, with a placeholder for the key */

const WORDS = {true: "True", false: "False", null: "None"};
const python = (value) => JSON.stringify(value).replace(/"(?:\\.|[^"\\])*"|true|false|null/g, (one) => WORDS[one] || one);
const SAMPLES = {
  // A single quote would end the shell's.
  curl: (url, body) => `curl ${body.stream ? "-N " : ""}'${url}' \\\n${key ? `  -H "Authorization: Bearer $SATURATE_KEY" \\\n` : ""}`
    + `  -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(body, null, 2).replace(/'/g, "\\u0027")}'`,
  python: (url, body, method) => `${key ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(\n`
    + `    base_url=${JSON.stringify(`${BASE}/v1`)},\n    api_key=${key ? `os.environ["SATURATE_KEY"]` : `"none"`},\n)\nanswer = client.${method
      ? `${method}(\n${Object.entries(body).map(([name, value]) => `    ${name}=${python(value)},\n`).join("")})`
      : `post(\n    ${JSON.stringify(url)},\n    cast_to=object,\n    body=${python(body)},\n)`}\n${!body.stream ? "print(answer)"
      : `for chunk in answer:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="", flush=True)`}`,
  node: (url, body, method) => `import OpenAI from "openai";\n\nconst client = new OpenAI({\n  baseURL: ${JSON.stringify(`${BASE}/v1`)},\n`
    + `  apiKey: ${key ? "process.env.SATURATE_KEY" : `"none"`},\n});\nconst answer = await client.${method
      ? `${method}(${JSON.stringify(body, null, 2)})` : `post(${JSON.stringify(url)}, {body: ${JSON.stringify(body, null, 2)}})`};\n${!body.stream
      ? "console.log(answer);" : `for await (const chunk of answer)\n  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");`}`,
};

function writeCode() {
  for (const button of byId("languages").children) button.ariaPressed = String(button.dataset.language === language);
  const method = {[CHAT]: "chat.completions.create", "/v1/embeddings": "embeddings.create"}[path()];
  put(byId("code"), FORMS[path()] ? SAMPLES[language](BASE + path(), bodyOf(true), method) : "");
}

byId("languages").onclick = (event) => { language = event.target.dataset.language || language; writeCode(); };
byId("try").addEventListener("input", writeCode);
byId("copy").onclick = async () => {
  // Browsers give the clipboard to https and to loopback only.
  await Promise.resolve().then(() => navigator.clipboard.writeText(byId("code").textContent)).catch(() => {
    getSelection().selectAllChildren(byId("code"));
    document.execCommand("copy");
  });
  put(byId("copy"), "Copied");
  setTimeout(() => put(byId("copy"), "Copy"), 1500);
};

/* Batches */

const ENDPOINTS = [CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/score", "/v1/classify", "/generate"];
const OPEN = new Set(["validating", "in_progress", "finalizing", "cancelling"]);
const PAGE = 20, MOST_WRONG = 20, MOST_LINE = 1 << 24, MOST_ID = 512, RATE_S = 60;
const batchViews = new Map(), cursors = [];
let chosen = null, cancelling = null;

async function loadBatches(signal) {
  const query = `limit=${PAGE}${cursors.length ? `&after=${encodeURIComponent(cursors.at(-1))}` : ""}`;
  const found = await askJSON(`v1/batches?${query}`, {signal}).catch((error) => {
    if (error.status !== 404) throw error;
    put(byId("batches-off"), `${error.message}. The setting \`batches\` of the config turns them on.`);
  });
  byId("batches-off").hidden = Boolean(found);
  byId("upload").hidden = !found;
  const batches = found?.data || [], shown = new Set(batches.map(({id}) => id));
  for (const [id, one] of batchViews) if (!shown.has(id)) one.root.remove(), batchViews.delete(id);
  batches.forEach((batch, place) => {
    const one = batchViews.get(batch.id) || new BatchView(batch), there = byId("list").children[place];
    batchViews.set(batch.id, one);
    if (there !== one.root) byId("list").insertBefore(one.root, there || null);
    one.update(batch);
  });
  byId("no-batches").hidden = !found || batches.length > 0;
  byId("newest").hidden = !cursors.length;
  byId("older").hidden = !found?.has_more;
  byId("older").value = found?.last_id || "";
  return batches.some(({status}) => OPEN.has(status)) ? 2000 : 30000;
}

class BatchView {
  constructor({id, metadata, created_at: created, endpoint, completion_window: within}) {
    const name = this.name = metadata?.file || id;
    const button = (text, ariaLabel, onclick) => el("button", {type: "button", hidden: true, ariaLabel, onclick}, text);
    Object.assign(this, {
      seen: [], badge: el("span", {className: "badge"}), bar: el("progress", {max: 1, ariaLabel: `Rows done of ${name}`}),
      figures: el("p"), warning: el("p", {className: "warn"}), wrong: el("p", {className: "bad text"}),
      cancel: button("Cancel", `Cancel ${name}`, () => askToCancel(id, name)),
      output: button("Output", `Download the output of ${name}`, () => this.download(this.batch.output_file_id, "output")),
      failed: button("Errors", `Download the errors of ${name}`, () => this.download(this.batch.error_file_id, "errors"))});
    const facts = joined(id !== name && id, endpoint, `created ${moment(created)}`, `window ${within}`);
    this.root = el("li", {className: "card batch"}, el("div", {className: "row"}, el("h2", {}, name), this.badge), this.bar, this.figures,
      el("p", {className: "soft"}, facts), this.warning, this.wrong, el("div", {className: "row actions"}, this.cancel, this.output, this.failed));
  }

  update(batch) {
    const {status, request_counts: {total, completed, failed}, in_progress_at: began, errors, warnings, usage} = this.batch = batch;
    const open = OPEN.has(status), now = Date.now() / 1000, done = completed + failed, wrong = errors?.data || [];
    this.seen = [...this.seen.filter(({at}) => at > now - RATE_S), {at: now, done}];
    const [from] = this.seen, since = now - from.at;
    // A batch that this page has just found has the rate since its begin.
    const rate = status !== "in_progress" ? 0 : since > 5 ? (done - from.done) / since : began && now > began ? done / (now - began) : 0;
    this.badge.className = `badge ${open ? "busy" : status === "completed" && !failed ? "good" : "bad"}`;
    this.bar.value = total ? done / total : 0;
    put(this.badge, status.replace("_", " "));
    put(this.figures, joined(total ? `${completed.toLocaleString("en")} of ${count(total, "row")} completed, ${failed.toLocaleString("en")} failed` : "no rows yet",
      rate > 0 && `${number(rate)} rows/s`, rate > 0 && `${seconds((total - done) / rate)} left`,
      usage?.total_tokens && `${number(usage.total_tokens)} tokens`));
    put(this.warning, (warnings || []).join(" "));
    put(this.wrong, [...wrong.slice(0, 5).map((one) => `${one.line ? `Line ${one.line}: ` : ""}${one.message}`),
      ...(wrong.length > 5 ? [`${wrong.length - 5} more`] : [])].join("\n"));
    this.cancel.hidden = !["validating", "in_progress"].includes(status);
    this.output.hidden = !batch.output_file_id;
    this.failed.hidden = !batch.error_file_id;
  }

  /* A link would not send the key. */
  download(id, kind) {
    return ask(`v1/files/${encodeURIComponent(id)}/content`).then((answer) => answer.blob()).then((blob) => {
      const href = URL.createObjectURL(blob);
      el("a", {href, download: `${this.batch.id}-${kind}.jsonl`}).click();
      setTimeout(() => URL.revokeObjectURL(href), 60000);
    }).catch((error) => put(this.wrong, error.message));
  }
}

function askToCancel(id, name) {
  cancelling = id;
  put(byId("sure-text"), `${name}: rows that have no result yet end at once. The results until now are kept.`);
  byId("sure").showModal();
}

byId("sure-no").onclick = () => byId("sure").close();
byId("sure-yes").onclick = async () => {
  const shown = batchViews.get(cancelling);
  byId("sure").close();
  await ask(`v1/batches/${encodeURIComponent(cancelling)}/cancel`, {method: "POST"}).catch((error) => shown && put(shown.wrong, error.message));
  start();
};
byId("older").onclick = () => { cursors.push(byId("older").value); start(); };
byId("newest").onclick = () => { cursors.length = 0; start(); };

/* Check the lines of a file in pieces, before its upload. */
async function check(file) {
  const own = chosen = {file, url: ""}, ids = new Set(), named = new Set(), wrong = [];
  let line = 0, rows = 0, told = 0;
  const refuse = (text) => wrong.push(`Line ${line}: ${text}`);
  byId("start").hidden = true;
  byId("wrong").replaceChildren();
  put(byId("upload-error"), "");
  put(byId("check"), `Checking ${file.name} …`);
  try {
    if (!models) await loadModels();
    for await (const text of linesOf(file.stream(), MOST_LINE)) {
      line += 1;
      if (own !== chosen) return;
      if (wrong.length > MOST_WRONG) break;
      if (performance.now() - told > 2000) told = performance.now(), put(byId("check"), `Checking ${file.name}: line ${number(line)}`);
      if (text.trim()) rows += 1, checkRow(text, own, ids, named, refuse);
    }
  } catch (error) {
    if ("status" in error) return put(byId("check"), error.message);
    line += 1;
    refuse(error instanceof RangeError ? `longer than ${bytes(MOST_LINE)}` : "not UTF-8, or the file can't be read");
  }
  if (own !== chosen) return;
  if (!rows && !wrong.length) refuse("the file has no rows");
  byId("wrong").replaceChildren(...wrong.slice(0, MOST_WRONG).map((text) => el("li", {}, text)));
  byId("start").hidden = wrong.length > 0;
  put(byId("check"), wrong.length ? `${file.name} can't be a batch. Its first errors, up to line ${line.toLocaleString("en")}:`
    : joined(file.name, bytes(file.size), count(rows, "row"), own.url, [...named].slice(0, 5).join(", ")));
}

function checkRow(text, own, ids, named, refuse) {
  const row = parsed(text);
  if (row === undefined) return refuse("not JSON");
  const {custom_id: id, method, url, body} = row || {}, model = body?.model;
  if (typeof id !== "string" || !id || id.length > MOST_ID) refuse(`custom_id must be a text of 1 to ${MOST_ID} characters`);
  else if (ids.has(id)) refuse(`custom_id ${JSON.stringify(id.slice(0, 80))} is not unique`);
  ids.add(id);
  if (method !== "POST") refuse("method must be POST");
  if (!ENDPOINTS.includes(url)) refuse(`url must be one of ${ENDPOINTS.join(", ")}`);
  else if (url !== (own.url ||= url)) refuse(`url must be ${own.url}, as in the lines before`);
  if (typeof body !== "object" || !body || Array.isArray(body)) return refuse("body must be an object");
  named.add(model);
  if (model === undefined && url === "/generate" && models.length === 1) return;
  if (!models.some((one) => one.id === model)) refuse(`the model ${JSON.stringify(model ?? null).slice(0, 200)} is not served for this key`);
}

/* Only XMLHttpRequest tells the progress of an upload. */
const upload = (file) => new Promise((resolve, reject) => {
  const form = new FormData(), request = new XMLHttpRequest();
  form.append("purpose", "batch");
  form.append("file", file, file.name);
  request.open("POST", "v1/files");
  for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
  request.upload.onprogress = (event) => { byId("sent").value = event.total ? event.loaded / event.total : 0; };
  request.onerror = () => reject(problem(0, "The upload broke off: the service does not answer."));
  request.onload = () => request.status === 200 ? resolve(parsed(request.responseText, {}))
    : reject(problemOf(request.status, request.responseText, request.getResponseHeader("retry-after")));
  request.send(form);
});

byId("upload").onsubmit = async (event) => {
  event.preventDefault();
  if (byId("start").hidden) return;
  const {file, url} = chosen, body = {endpoint: url, completion_window: byId("window").value, metadata: {file: file.name.slice(0, 500)}};
  byId("start").hidden = true;
  [byId("sent").hidden, byId("sent").value] = [false, 0];
  put(byId("check"), `Uploading ${file.name}, ${bytes(file.size)} …`);
  try {
    await ask("v1/batches", {body: {...body, input_file_id: (await upload(file)).id}});
    put(byId("check"), `${file.name} is a batch now.`);
    [chosen, cursors.length, byId("file").value] = [null, 0, ""];
  } catch (error) {
    put(byId("upload-error"), error.message);
    put(byId("check"), `${file.name} was not started.`);
    byId("start").hidden = false;
  }
  byId("sent").hidden = true;
  start();
};
byId("file").onchange = () => byId("file").files[0] && check(byId("file").files[0]);
for (const kind of ["dragover", "dragleave", "drop"])
  addEventListener(kind, (event) => {
    // Elsewhere on the page, a drop would open the file in place of it.
    event.preventDefault();
    const inside = byId("drop").contains(event.target);
    byId("drop").classList.toggle("over", kind === "dragover" && inside);
    if (kind === "drop" && inside && event.dataTransfer.files[0]) check(event.dataTransfer.files[0]);
  });

/* Live */

const KEEP = 300;
const COUNTS = ["completed", "failed", "cancelled", "expired", "rejected"];
const LIMITS = ["of", "limit", "at most", "used", "left", "new in"];
const modelViews = new Map(), limits = new Table("Quotas, the fullest first");
let stats = null;
byId("limits").append(limits.root);
const matches = (name) => String(name).toLowerCase().includes(byId("filter").value.trim().toLowerCase());

async function loadLive(signal) {
  stats = await askJSON("stats", {signal});
  for (const [name, model] of Object.entries(stats.models)) {
    if (!modelViews.has(name)) modelViews.set(name, new ModelView(name));
    modelViews.get(name).add(model);
  }
  showLive();
  return 1000;
}

function showLive() {
  if (!stats) return;
  for (const [name, one] of modelViews) one.root.hidden = !(name in stats.models && one.show());
  put(byId("batch-line"), stats.batches ? lineOf(stats.batches) : "this service has none");
  limits.update(LIMITS, limitRows(stats.quotas, matches));
}

function lineOf({error, batches = {}, rows = {}, rows_per_s: rate, eta_s: left, oldest_s: oldest, late}) {
  const open = Object.entries(batches).filter(([, many]) => many).map(([state, many]) => `${many} ${state}`).join(", ");
  const states = ["waiting", "in_flight", "completed", "failed"].map((state) => `${number(rows[state])} ${state.replace("_", " ")}`).join(", ");
  return error || (!open ? "none is open" : joined(open, `rows: ${states}`, `${number(rate)} rows/s`, left && `${seconds(left)} left`,
    `the oldest is ${seconds(oldest)} old`, late && `${late} will be late`));
}

function limitRows(quotas, wanted) {
  const all = Object.entries(quotas?.limits || {}).filter(([name]) => wanted(name)).flatMap(([name, states]) =>
    Object.entries(states).map(([limit, state]) => ({name, limit, most: state.limit, state, share: 1 - state.remaining / state.limit})));
  return all.sort((one, other) => other.share - one.share).map(({name, limit, most, state, share}) => [name, limit.replaceAll("_", " "),
    number(most), [percent(share), share], number(state.remaining), state.ends_in_s === null ? "–" : seconds(state.ends_in_s)]);
}

class Tile {
  constructor(title) {
    Object.assign(this, {value: el("b"), unit: el("i"), detail: el("p")});
    const drawn = (tag, parts) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(parts)) made.setAttribute(name, value);
      return made;
    };
    const svg = drawn("svg", {viewBox: "0 0 100 40", preserveAspectRatio: "none", "aria-hidden": "true"});
    this.paths = ["area", "line", "goal"].map((kind) => svg.appendChild(drawn("path", {class: kind})));
    this.root = el("div", {className: "tile"}, el("h3", {}, title), this.value, this.unit, this.detail, svg);
  }

  update([value, unit, detail, values, top, goal]) {
    put(this.value, value);
    put(this.unit, unit);
    put(this.detail, detail);
    // A young page fills its plots sooner: their axis is half a minute at first.
    const high = top || Math.max(...values, goal || 0, 1e-9), wide = Math.max(values.length, 30);
    const x = (index) => (100 * (wide - values.length + index) / (wide - 1)).toFixed(2);
    const y = (one) => (38 - 36 * Math.min(one / high, 1)).toFixed(2);
    const line = values.map((one, index) => `${index ? "L" : "M"}${x(index)} ${y(one)}`).join("");
    const drawn = [`${line}L100 40L${x(0)} 40Z`, line, goal ? `M0 ${y(goal)}L100 ${y(goal)}` : ""];
    drawn.forEach((shape, place) => this.paths[place].setAttribute("d", shape));
  }
}

class ModelView {
  constructor(name) {
    Object.assign(this, {name, past: [], tiles: new Map(), state: el("small"), grid: el("div", {className: "tiles"}),
      replicas: new Table(`Replicas of ${name}`), tenants: new Table(`Tenants of ${name} since the replicas began`)});
    this.root = el("div", {}, el("h2", {}, name, this.state), this.grid, this.replicas.root, this.tenants.root);
    byId("models").append(this.root);
  }

  /* Keep the figures of now, for the plots. */
  add(model) {
    this.model = model;
    this.past = [...this.past.slice(1 - KEEP), model.total];
  }

  /* Update what is shown; return whether the filter lets anything of it through. */
  show() {
    const {model, name} = this, many = model.replicas.length, whole = matches(name);
    const turns = new Set(model.replicas.map((one) => one.turn?.state).filter(Boolean));
    put(this.state, model.error || joined(many ? count(many, "replica") : joined(model.state, model.detail), [...turns].join(", ")));
    this.showTiles(many > 0);
    const rows = model.replicas.filter((one) => one.batcher && (whole || matches(one.replica))).map(({replica, batcher, rates, turn}) => {
      const share = batcher.capacity ? batcher.running_cost / batcher.capacity : undefined;
      return [replica, ...(turns.size ? [turn?.state || "–"] : []), number(batcher.queue_depth), number(batcher.running),
        share === undefined ? "–" : [percent(share), share], percent(rates?.busy || 0), number(rates?.requests_per_s || 0),
        seconds(batcher.wait_p99_s), ...COUNTS.map((kind) => number(batcher[`total_${kind}`]))];
    });
    const turn = turns.size ? ["turn"] : [], uses = useRows({[name]: model}, (tenant) => whole || matches(tenant));
    this.replicas.update(["replica", ...turn, "waiting", "running", "KV reserved", "busy", "per second", "wait 99 %", ...COUNTS], rows);
    const kinds = uses.some((use) => use.cost) ? ["calls", "cost"] : ["calls", "prompt", "cached", "output"];
    this.tenants.update(["tenant", ...kinds.map((kind) => kinds.length > 2 && kind !== "calls" ? `${kind} tokens` : kind)],
      uses.map((use) => [use.tenant, ...kinds.map((kind) => number(use[kind]))]));
    return whole || rows.length > 0 || uses.length > 0;
  }

  showTiles(awake) {
    const now = this.model.total, series = (key) => this.past.map((one) => one[key] || 0), goals = now.goals || {};
    const goal = (value) => value ? `goal ${seconds(value)}` : "no goal", size = now.batch_size ? `${now.batch_size.toFixed(1)} to a batch` : "no batch yet";
    const tiers = Object.entries(now.waiting_by_tier).map(([tier, records]) => `${records} ${tier}`).join(", ");
    const tiles = !awake ? {} : {
      Waiting: [number(now.waiting), "records", tiers || "nothing waits", series("waiting")],
      Running: [number(now.running), "records", now.kv_capacity ? `${number(now.background_running)} flex` : size, series("running")],
      ...(now.kv_capacity ? {
        "KV cache": [percent(now.kv_used), "reserved", `${number(now.kv_tokens)} of ${number(now.kv_capacity)} tokens`, series("kv_used"), 1],
        "Tokens out": [number(now.output_tokens_per_s), "/s", `${number(now.requests_per_s)} records/s`, series("output_tokens_per_s")],
        TTFT: [seconds(now.ttft_p50_s || 0), "median", joined(`99 %: ${seconds(now.ttft_p99_s || 0)}`, goal(goals.ttft_p99_s)),
          series("ttft_p99_s"), 0, goals.ttft_p99_s],
        // While a model begins, few tokens make it high: the plot ends at three times the goal.
        TPOT: [seconds(now.tpot_s || 0), "mean", goal(goals.tpot_p99_s), series("tpot_s"), 3 * (goals.tpot_p99_s || 0), goals.tpot_p99_s],
      } : {Throughput: [number(now.requests_per_s), "records/s", `${number(now.completed)} so far`, series("requests_per_s")],
        Padding: [percent(now.padding || 0), "", "of the cost of batches", series("padding"), 1]}),
      Wait: [seconds(now.wait_p50_s), "median", `99 %: ${seconds(now.wait_p99_s)}`, series("wait_p99_s")],
      "Run time": [seconds(now.run_p50_s), "median", `99 %: ${seconds(now.run_p99_s)}`, series("run_p99_s")]};
    for (const [title, tile] of this.tiles) if (!(title in tiles)) tile.root.remove(), this.tiles.delete(title);
    for (const [title, values] of Object.entries(tiles)) {
      if (!this.tiles.has(title)) this.tiles.set(title, new Tile(title)), this.grid.append(this.tiles.get(title).root);
      this.tiles.get(title).update(values);
    }
  }
}

/* Return the use of each tenant and model since the replicas began, the largest first. */
function useRows(all, wanted) {
  const size = ({prompt, output, cost}) => prompt + output + cost;
  return Object.entries(all).flatMap(([model, {total}]) => Object.entries(total.tenants).filter(([tenant]) => wanted(tenant))
    .map(([tenant, use]) => ({tenant, model, ...use}))).sort((one, other) => size(other) - size(one));
}

byId("filter").oninput = showLive;

/* Keys and use */

const ownUse = new Table("Use since the replicas began"), ownLimits = new Table("Quotas, and what is left");
const usage = new Table("Use"), allKeys = new Table("API keys");
let admin = null, usageAsked = "";

async function loadUse(signal) {
  const found = await askJSON("stats", {signal}), any = Object.keys(found.quotas?.limits || {}).length;
  // A key that is not an administrator's gets a 403, once.
  if (key && admin === null) admin = await askJSON("v1/admin/keys", {signal}).then(({data}) => data, (error) => {
    if (error.status !== 403) throw error;
    return false;
  });
  const who = admin ? "This key is an administrator's: it sees all keys and tenants." : key
    ? "This key sees the quotas and the use of itself and of its tenant." : "Without an API key, the page shows the use of all tenants.";
  put(byId("own-note"), `${who} ${found.quotas?.error || (any ? "" : "No quota limits them.")}`);
  byId("own").append(ownLimits.root, ownUse.root);
  ownLimits.update(LIMITS, limitRows(found.quotas, () => true));
  ownUse.update(["tenant", "model", "calls", "prompt tokens", "cached tokens", "output tokens", "cost"], useRows(found.models, () => true)
    .map((one) => [one.tenant, one.model, ...[one.calls, one.prompt, one.cached, one.output, one.cost].map(number)]));
  byId("admin").hidden = !admin;
  if (admin) await loadAdmin(signal);
  return 15000;
}

async function loadAdmin(signal) {
  const by = byId("by").value.split(","), wanted = `v1/admin/usage?${new URLSearchParams({by, since: byId("since").value})}`;
  const quota = (limits) => Object.entries(limits || {}).filter(([, most]) => most).map(([name, most]) => `${number(most)} ${name.replaceAll("_", " ")}`);
  byId("all-keys").append(allKeys.root);
  allKeys.update(["name", "tenant", "state", "tiers", "models", "expires", "quota"], admin.map((one) => [
    one.name, one.tenant, joined(one.state, one.admin && "admin"), one.tiers.join(", "), one.models ? one.models.slice(0, 5).join(", ") : "all",
    one.expires_at ? moment(one.expires_at) : "never", quota(one.quota).join(", ") || "none"]));
  // A report reads the whole ledger: it is made once for each choice.
  if (usageAsked === key + wanted) return;
  put(byId("usage-note"), "The ledger is being read …");
  try {
    const {rows, since, currency} = await askJSON(wanted, {signal}), kinds = ["calls", "prompt_tokens", "cached_tokens", "output_tokens", "cost"];
    byId("usage").append(usage.root);
    usage.update([...by, ...kinds.map((name) => name.replace("_", " ")), "engine", ...(currency ? [currency] : [])], rows.map((row) =>
      [...by.map((name) => row[name]), ...kinds.map((name) => number(row[name])), seconds(row.engine_s), ...(currency ? [row.price ?? "–"] : [])]));
    put(byId("usage-note"), `${rows.length ? "Calls" : "No calls"} that ended since ${moment(Date.parse(since) / 1000)}, from the ledger.`);
  } catch (error) {
    if (![400, 404].includes(error.status)) throw error;
    put(byId("usage-note"), error.message);
  }
  usageAsked = key + wanted;
}

byId("by").onchange = byId("since").onchange = start;
byId("skip").onclick = (event) => { event.preventDefault(); byId("main").focus(); };
byId("again").onclick = start;
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", start);
showKey(false);
route();
