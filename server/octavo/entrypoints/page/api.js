// Requests to the server that this page comes from, and what the page keeps in the browser.

const base = location.pathname.replace(/\/?$/, "/"); // a proxy may serve this below a path
const $ = (id) => document.getElementById(id);

/** What a tab keeps under a name: over a reload its own, in a new tab what any tab kept last. */
const kept = {
  read(name) {
    try {
      return JSON.parse(sessionStorage.getItem(base + name) ?? localStorage.getItem(base + name));
    } catch {
      return null;
    }
  },
  /** Returns false where the browser has no room for it. */
  write(name, value) {
    try {
      sessionStorage.setItem(base + name, JSON.stringify(value));
      localStorage.setItem(base + name, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  },
};

/** A request that the server has not answered as asked. `status`: 0 where it did not answer at all. */
class Refusal extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The answer to a request, with success. Asks the visitor for a key where the server does. Throws a Refusal. */
async function call(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(`${base}key`);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(base + path, { method: body === undefined ? "GET" : "POST", headers, body, signal, cache: "no-store" });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Refusal(`The server at ${location.host} does not answer. Once it runs again, retry.`);
    }
    if (answer.ok) return answer;
    if (answer.status !== 401) throw await refusalOf(answer);
    if (sessionStorage.getItem(`${base}key`) === key) await askForKey(key !== null); // else another request has asked
  }
}

async function refusalOf(answer) {
  const text = await answer.text().catch(() => "");
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // a proxy's page, or nothing
  }
  const size = answer.status === 413 ? " Make the message shorter (Edit), or its pictures fewer." : "";
  return new Refusal((error.message ?? (text.slice(0, 300) || `The server answered ${answer.status}.`)) + size, answer.status, error.code);
}

let asking = null;

/** Until the visitor has given a key. Throws a Refusal where they close the question. */
function askForKey(wrong) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = $("ask");
    $("ask-why").textContent = (wrong ? "The server does not accept this key. " : "This server asks for an API key. ")
      + "The key stays in this tab and goes to this server alone.";
    $("key").value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const key = $("key").value.trim();
      $("key").value = "";
      if (dialog.returnValue !== "use" || !key) return reject(new Refusal("This server asks for an API key. Retry to enter one.", 401));
      sessionStorage.setItem(`${base}key`, key);
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** The events of a stream, parsed, each with the time at which it was read. Throws a Refusal where it ends before it is complete. */
async function* events(answer) {
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const time = performance.now();
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: [DONE]")) return;
        if (!line.startsWith("data: ")) continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Refusal(event.error.message ?? "The server failed.", 500);
        yield [event, time];
      }
    }
  } catch (error) {
    if (error instanceof Refusal || error.name === "AbortError") throw error;
    throw new Refusal("The answer broke off: the connection to the server was lost. What has come is kept.");
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new Refusal("The answer broke off: the server ended it early. What has come is kept.");
}
