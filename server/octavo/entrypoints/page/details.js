// The tab about the model: what the server tells of it, and how programs ask it.

async function showDetails(card) {
  const host = $("details");
  const asked = [call("props"), call("api/show", { body: JSON.stringify({ model: card.id }) }), call("version")];
  const answers = (await Promise.allSettled(asked)).map((one) => (one.status === "fulfilled" ? one.value.json() : {}));
  const [props, show, version] = await Promise.all(answers);
  const info = Object.entries(show.model_info ?? {}).filter(([, value]) => ["string", "number"].includes(typeof value));
  const sampling = Object.entries(card.default_sampling_params ?? {}).map(([name, value]) => `${name} ${value}`);
  const rows = [
    ["Served as", card.id],
    ["Loaded from", card.root],
    ["Adapter of", card.parent],
    ["Context", card.max_model_len && `${card.max_model_len.toLocaleString("en")} tokens, prompt and answer together`],
    ["Sequences at once", props.total_slots],
    ["Reads", card.input_modalities?.join(", ")],
    ["Can", show.capabilities?.join(", ")],
    ["Family", show.details?.family],
    ["Parameters", show.details?.parameter_size],
    ["Precision", show.details?.quantization_level],
    ["Recommended sampling", sampling.join(", ")],
    ["Server", version.version && `Octavo ${version.version}`],
  ];
  const api = location.origin + base + "v1";
  const body = JSON.stringify({ model: card.id, messages: [{ role: "user", content: QUESTIONS[0] }] });
  const key = sessionStorage.getItem(`${base}key`) ? " \\\n  -H \"Authorization: Bearer $OCTAVO_API_KEY\"" : "";
  const curl = `curl ${api}/chat/completions -H "Content-Type: application/json"${key} \\\n  -d '${body.replaceAll("'", "'\\''")}'`;
  host.replaceChildren(
    element("h2", {}, "Model"), tableOfPairs(rows.filter(([, value]) => value)),
    element("h2", {}, "For programs"),
    element("p", {}, "Any OpenAI client works with the base URL ", element("code", {}, api), "; Anthropic's and Ollama's work with ", element("code", {}, location.origin + base), "."),
    codeBlock(curl, "shell"),
    element("p", {}, element("a", { href: `${base}docs` }, "Every route, to read and to try"), " · ", element("a", { href: `${base}metrics` }, "Metrics")),
    ...(info.length ? [element("details", {}, element("summary", {}, "From the model's files"), tableOfPairs(info))] : []),
    ...(props.chat_template ? [element("details", {}, element("summary", {}, "Chat template"), codeBlock(props.chat_template, "Jinja"))] : []),
  );
}

function tableOfPairs(rows) {
  const lines = rows.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, String(value))));
  return element("div", { className: "wide", tabIndex: 0, role: "group", "aria-label": "Facts" }, element("table", {}, element("tbody", {}, ...lines)));
}
