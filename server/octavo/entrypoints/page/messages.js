// Messages as they are shown, with what can be done to each.

const NAMES_OF_ROLES = { user: "You", assistant: "Answer", tool: "Result of the tool" };

function button(text, act, properties = {}) {
  const made = element("button", { type: "button", className: "small", ...properties }, text);
  made.addEventListener("click", act);
  return made;
}

/** The article of a message. Its `update()` shows what the message has become. `acts`: retry(), mayEdit(form), edit(text),
 * result(texts), isLast(). */
function articleOf(message, acts) {
  const article = element("article", { className: `message ${message.role}` }, element("h2", {}, NAMES_OF_ROLES[message.role]));
  if (message.pictures?.length) {
    article.append(element("div", { className: "thumbs" }, ...message.pictures.map((src) => element("img", { src, className: "thumb", alt: "Attached picture" }))));
  }
  const thinking = element("div");
  const thought = element("details", { className: "thinking", hidden: true }, element("summary", {}, "Thinking"), thinking);
  const body = element("div", { className: "body" });
  const calls = element("div");
  const problem = element("p", { className: "problem-text", hidden: true });
  const figures = element("span", { className: "figures" });
  const under = element("div", { className: "under" });
  article.append(thought, body, calls, problem, under);
  under.append(button("Copy", (event) => copyText(message.text, event.target)), button("Edit", () => edit(article, message, acts)));
  if (message.role !== "tool") under.append(button("Retry", acts.retry));
  under.append(figures);
  article.update = (busy) => {
    article.classList.toggle("busy", busy);
    article.ariaBusy = String(busy);
    thought.hidden = !message.thought;
    if (message.thought && thinking.textContent.length !== message.thought.length) thinking.textContent = message.thought;
    if (message.role === "assistant") showMarkdown(body, message.text);
    else body.textContent = message.text;
    body.hidden = !busy && !message.text;
    if (!busy || message.calls?.length !== calls.childElementCount) showCalls(calls, message, acts, busy);
    problem.hidden = !message.problem;
    problem.textContent = message.problem ?? "";
    figures.textContent = message.figures ?? "";
    for (const one of under.querySelectorAll("button")) one.hidden = busy;
  };
  return article;
}

/** Replaces the message by a field, until it is saved or left. */
function edit(article, message, acts) {
  const field = element("textarea", { value: message.text, "aria-label": `Edit: ${NAMES_OF_ROLES[message.role]}` });
  const hidden = [...article.children].filter((child) => child.nodeName !== "H2" && !child.hidden);
  const close = () => {
    form.remove();
    for (const child of hidden) child.hidden = false;
    article.querySelector(".under button:nth-child(2)").focus();
  };
  const send = message.role === "assistant" ? "Save" : "Save and send";
  const form = element("form", { className: "editing" }, field, element("div", { className: "under" },
    element("button", { className: "small main" }, send), button("Cancel", close)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!acts.mayEdit(form)) return;
    close();
    acts.edit(field.value);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  for (const child of hidden) child.hidden = true;
  article.append(form);
  field.focus();
}

/** The calls of tools, and where nothing follows them, fields for what they return. */
function showCalls(host, message, acts, busy) {
  const calls = message.calls ?? [];
  host.replaceChildren(...calls.map(({ name, arguments: given }) => element("details", { open: true }, element("summary", {}, `Calls ${name}`), codeBlock(pretty(given), "JSON"))));
  if (busy || !calls.length || !acts.isLast()) return;
  const fields = calls.map(({ name }) => element("textarea", { required: true, "aria-label": `What ${name} returns`, placeholder: `What ${name} returns` }));
  const form = element("form", {}, ...fields, element("button", { className: "small main" }, "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    acts.result(fields.map((field) => field.value));
  });
  host.append(form);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
