// The conversation: what has been said, what of it the server is sent, and the answers that come back.
//
// A message is {role, text}; a user's may have `pictures` (data URLs), an assistant's `thought`, `calls` ({id, name,
// arguments}), `figures`, `problem`, `id`; a tool's has `callId`.

// What is sent where neither the visitor nor the model's files set a value: as `octavo chat` does.
const CHAT_SAMPLING = { temperature: 0.7, top_p: 0.9, min_p: 0.05 };
const SHARE = 4; // an answer takes at most a fourth of the context unless told otherwise: small models may never stop
const LEAST_SECONDS = 0.001; // between the first and the last token of an answer that has a rate

const conversation = { messages: kept.read("conversation") ?? [], before: null, running: null };

/** Keeps the conversation in the browser, where there is no room for pictures without them. */
function keep() {
  if (kept.write("conversation", conversation.messages)) return;
  kept.write("conversation", conversation.messages.map((one) => ({ ...one, pictures: undefined })));
}

/** Drops what follows the first `count` messages, and remembers it for Undo. */
function cutTo(count) {
  conversation.before = structuredClone(conversation.messages);
  conversation.messages.length = count;
}

/** Pairs of a question and why it was not answered are left out: templates want turns to alternate. */
function answered(messages) {
  const failed = (one) => one?.role === "assistant" && one.problem && !one.text && !one.calls?.length;
  return messages.filter((one, i) => !failed(one) && !(one.role === "user" && failed(messages[i + 1])));
}

/** The body of a request for the next answer. `skip`: messages at the beginning that are left out. Throws a Refusal. */
function bodyOf(messages, settings, card, skip) {
  const said = answered(messages).slice(skip).map(wireForm);
  if (settings.system) said.unshift({ role: "system", content: settings.system });
  const recommended = card.default_sampling_params ?? {};
  const sampling = Object.keys(recommended).length || !card.default_sampling_params ? {} : { ...CHAT_SAMPLING };
  for (const name of ["temperature", "top_p"]) if (settings[name] !== "") sampling[name] = Number(settings[name]);
  const most = Number(settings.max_tokens) || Math.floor((card.max_model_len ?? 8192) / SHARE);
  const body = { model: card.id, messages: said, ...sampling, max_tokens: most, stream: true, stream_options: { include_usage: true } };
  if (settings.tools.trim()) {
    try {
      body.tools = JSON.parse(settings.tools);
    } catch (error) {
      throw new Refusal(`The tools in the settings are not JSON: ${error.message}`, 400);
    }
  }
  return body;
}

function wireForm(one) {
  if (one.role === "tool") return { role: "tool", tool_call_id: one.callId, content: one.text };
  if (one.role === "user" && one.pictures?.length) {
    const parts = one.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role: "user", content: one.text ? [...parts, { type: "text", text: one.text }] : parts };
  }
  const calls = one.calls?.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return { role: one.role, content: one.text, ...(calls?.length ? { tool_calls: calls } : {}) };
}

/** Fills `message` with the next answer; `changed` is called as it grows. Never throws: what is wrong is its problem. */
async function answerInto(message, messages, settings, card, changed) {
  const controller = new AbortController();
  conversation.running = { controller, message };
  const times = { begin: performance.now(), first: 0, last: 0 };
  try {
    const stream = await ask(messages, settings, card, controller.signal, message);
    for await (const [event, time] of events(stream)) {
      take(event, message, times, time);
      changed();
    }
  } catch (error) {
    if (controller.signal.aborted) message.stopped = true;
    else message.problem = error instanceof Refusal ? error.message : `The server's answer cannot be read: ${error.message}`;
  }
  message.figures = figuresOf(message, times);
  delete message.usage;
  conversation.running = null;
}

/** The response to the conversation; where it is too long for the model, without the oldest turns. */
async function ask(messages, settings, card, signal, message) {
  const most = answered(messages).length;
  for (let skip = 0; ; ) {
    try {
      return await call("v1/chat/completions", { body: JSON.stringify(bodyOf(messages, settings, card, skip)), signal });
    } catch (error) {
      const said = answered(messages);
      let next = skip + 1;
      while (next < most && said[next].role !== "user") next++;
      if (error.code !== "context_length_exceeded" || next >= most) throw error;
      message.skipped = skip = next;
    }
  }
}

function take(event, message, times, time) {
  message.id ??= event.id;
  message.usage = event.usage ?? message.usage;
  for (const choice of event.choices ?? []) {
    const delta = choice.delta ?? {};
    const thought = delta.reasoning ?? delta.reasoning_content ?? "";
    const text = delta.content ?? "";
    if (thought || text || delta.tool_calls?.length) {
      times.first ||= time;
      times.last = time;
    }
    message.thought = (message.thought ?? "") + thought;
    message.text += text;
    message.finish = choice.finish_reason ?? message.finish;
    for (const piece of delta.tool_calls ?? []) {
      const made = ((message.calls ??= [])[piece.index ?? 0] ??= { id: "", name: "", arguments: "" });
      made.id = piece.id ?? made.id;
      made.name += piece.function?.name ?? "";
      made.arguments += piece.function?.arguments ?? "";
    }
  }
}

/** The line under an answer, as far as the server tells; no rate where all tokens came at once, as by a proxy that
 * collects them. */
function figuresOf(message, { begin, first, last }) {
  const usage = message.usage ?? {};
  const count = usage.completion_tokens ?? 0;
  const seconds = (last - first) / 1000;
  const parts = [];
  if (first) parts.push(`first token ${Math.round(first - begin).toLocaleString("en")} ms`);
  if (count > 1 && seconds >= LEAST_SECONDS) parts.push(`${((count - 1) / seconds).toLocaleString("en", { maximumFractionDigits: 1 })} tokens/s`);
  if (count) parts.push(`${count.toLocaleString("en")} token${count > 1 ? "s" : ""}`);
  if (usage.prompt_tokens) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${cached.toLocaleString("en")} of ${usage.prompt_tokens.toLocaleString("en")} prompt tokens cached`);
  }
  if (message.stopped) parts.push("stopped");
  if (message.finish === "length") parts.push("cut off at max_tokens: raise it in the settings");
  if (message.skipped) parts.push(`the context is full: without the oldest ${message.skipped} messages`);
  return parts.join(" · ");
}
