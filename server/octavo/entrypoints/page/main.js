// The page as a whole: its tabs, the server's state, and what the buttons do.

const QUESTIONS = {questions}; // proposed while nothing has been said
const LOOK_MS = 5000; // between looks at the server's state, while the page is seen
const server = { cards: [], keyless: false }; // keyless: the visitor has closed the question for a key

function card() {
  return server.cards.find((one) => one.id === $("model").value) ?? server.cards[0] ?? { id: null };
}

/** Reads which models there are. Throws a Refusal. */
async function loadModels() {
  const { data } = await (await call("v1/models")).json();
  const chosen = $("model").value || kept.read("model");
  server.cards = data;
  $("model").replaceChildren(...data.map(({ id }) => element("option", { value: id, selected: id === chosen }, id)));
  modelChanged();
}

function modelChanged() {
  const { id, input_modalities: reads, default_sampling_params: recommended, max_model_len: longest } = card();
  kept.write("model", id);
  document.title = id ? `${id} · Octavo` : "Octavo";
  tray.reads = Boolean(reads?.includes("image"));
  tray.modelName = id;
  $("attach").hidden = !tray.reads;
  $("temperature").placeholder = recommended?.temperature ?? CHAT_SAMPLING.temperature;
  $("top_p").placeholder = recommended?.top_p ?? CHAT_SAMPLING.top_p;
  $("max_tokens").placeholder = longest ? Math.floor(longest / SHARE) : "";
  if (!$("details").hidden) showTab("details");
}

/** Looks at the server's state. `asked`: by the visitor, who is asked for a key again. */
async function look(asked = false) {
  let problem = "";
  try {
    const answer = await fetch(`${base}readyz`, { cache: "no-store" }); // which needs no key
    if (!answer.ok) problem = (await refusalOf(answer)).message;
    else if (!server.cards.length && !asking && (asked || !server.keyless)) await loadModels();
    else if (server.keyless && !asking) return;
    server.keyless = false;
  } catch (error) {
    problem = error instanceof Refusal ? error.message : "The server does not answer";
    server.keyless = error.status === 401;
  }
  $("state").textContent = problem || "Ready";
  $("state").classList.toggle("problem", Boolean(problem));
  if (problem && !server.cards.length) $("state").append(" ", button("Retry", () => look(true)));
}

function showTab(name) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (name === "details") showDetails(card());
  if (name === "memory") lookAtMemory();
}

let looking = 0;
async function lookAtMemory() {
  clearTimeout(looking);
  if ($("memory").hidden) return;
  if (!document.hidden) await showMemory(conversation.messages.findLast((one) => one.id)?.id);
  looking = setTimeout(lookAtMemory, 1000);
}

function watchTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const [i, tab] of tabs.entries()) {
    tab.addEventListener("click", () => showTab(tab.getAttribute("aria-controls")));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(i + step + tabs.length) % tabs.length];
      next.focus();
      next.click();
    });
  }
}

/** Shows all messages anew. */
function showMessages() {
  const { messages } = conversation;
  const empty = element("div", { className: "empty" },
    element("p", {}, "What is said here stays between this browser and this server."),
    element("p", {}, ...QUESTIONS.map((text) => button(text, () => propose(text)))));
  $("messages").replaceChildren(...(messages.length ? messages.map((one, i) => shown(one, i)) : [empty]));
  showButtons();
}

/** Puts a proposed question into the field, for the visitor to send; what is being written there stays. */
function propose(text) {
  const field = $("message");
  field.value = field.value.trim() ? `${field.value}\n${text}` : text;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  field.focus();
}

function shown(message, i) {
  const { messages } = conversation;
  const own = message.role === "user" ? i + 1 : i; // a question's answer, or this answer, is asked for again
  const article = articleOf(message, {
    retry: () => again(own),
    isLast: () => i === messages.length - 1,
    mayEdit: isFree,
    edit: (text) => (message.role === "assistant" ? change(i, text) : again(i + 1, i, text)),
    result: (texts) => {
      if (!isFree()) return;
      messages.push(...texts.map((text, k) => ({ role: "tool", text, callId: message.calls[k].id })));
      next();
    },
  });
  article.update(conversation.running?.message === message);
  return article;
}

/** Whether messages may change now, else says why not. `own`: the form of the message that is to change. */
function isFree(own = null) {
  const open = [...document.querySelectorAll(".editing")].find((form) => form !== own);
  if (conversation.running) say("An answer is on its way: stop it, or wait for its end.");
  else if (open) say("A message is being edited: save it or cancel first.");
  else say("");
  open?.querySelector("textarea").focus();
  return !conversation.running && !open;
}

function change(i, text) {
  cutTo(conversation.messages.length);
  conversation.messages[i].text = text;
  keep();
  showMessages();
}

/** Asks for another answer after the first `count` messages; with a text, message `i` of them is changed to it. */
function again(count, i = -1, text = "") {
  if (!isFree()) return;
  cutTo(count);
  if (i >= 0) conversation.messages[i].text = text;
  next();
}

/** Asks for the next answer, and shows it as it comes. */
async function next() {
  const { messages } = conversation;
  const message = { role: "assistant", text: "" };
  const before = [...messages];
  messages.push(message);
  keep();
  let changed = true;
  const answering = answerInto(message, before, settingsOf(), card(), () => (changed = true));
  showMessages();
  const article = $("messages").lastChild;
  $("messages").scrollTop = $("messages").scrollHeight;
  let pause = 0;
  const paint = (now) => {
    if (conversation.running?.message !== message) return; // it is complete, and shown so
    if (changed && now >= pause) {
      changed = false;
      follow(() => article.update(true));
      pause = now + 4 * (performance.now() - now); // of a long answer most time is left for the rest
    }
    requestAnimationFrame(paint);
  };
  requestAnimationFrame(paint);
  const saving = setInterval(keep, 2000);
  await answering;
  clearInterval(saving);
  keep();
  follow(() => {
    article.update(false);
    showButtons();
  });
  $("announce").textContent = message.problem ?? "The answer is complete";
}

/** Keeps the end in sight, unless the reader has scrolled away from it. */
function follow(act) {
  const box = $("messages");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  act();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

function showButtons() {
  $("stop").hidden = !conversation.running;
  $("send").hidden = Boolean(conversation.running);
  $("new").disabled = Boolean(conversation.running) || !conversation.messages.length;
  $("undo").hidden = Boolean(conversation.running) || !conversation.before;
}

async function send() {
  await adding; // pictures that are being read
  const text = $("message").value.trim();
  if ((!text && !tray.pictures.length) || !isFree()) return;
  conversation.before = null;
  conversation.messages.push({ role: "user", text, ...(tray.pictures.length ? { pictures: tray.pictures } : {}) });
  tray.pictures = [];
  showTray();
  $("message").value = "";
  kept.write("draft", "");
  next();
}

watchTabs();
watchPictures();
watchComposer(send, () => (card().max_model_len ?? 262_144) * CHARACTERS_PER_TOKEN);
$("model").addEventListener("change", modelChanged);
$("stop").addEventListener("click", () => {
  conversation.running?.controller.abort();
  $("message").focus();
});
$("undo").addEventListener("click", () => {
  if (!isFree()) return;
  [conversation.messages, conversation.before] = [conversation.before, null];
  keep();
  showMessages();
  $("message").focus();
});
$("new").addEventListener("click", () => {
  if (!isFree()) return;
  cutTo(0);
  keep();
  showMessages();
  $("message").focus();
});
document.addEventListener("visibilitychange", () => document.hidden || look());
setInterval(() => document.hidden || look(), LOOK_MS);
showMessages();
look();
$("message").focus();
