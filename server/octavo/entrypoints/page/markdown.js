// Markdown as nodes of the document. Nothing here parses HTML: what a model writes can only become text, or one of the
// elements below, and a link leads to http or https alone.

const DEEPEST = 10; // of lists and quotes; what lies deeper is text
// Models write texts of any kind: no expression below goes back over what it has read more often than a few times.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const DELIMITERS = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** An element with properties and children; a child is a node or a text. */
function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** Shows a text that grows in `host`: blocks that have not changed stay, and keep what a reader has selected. */
function showMarkdown(host, text) {
  const blocks = blocksOf(text.split("\n"));
  const shown = host.shownBlocks ?? [];
  let same = 0;
  while (same < shown.length && same < blocks.length && shown[same] === blocks[same].raw) same++;
  while (host.childNodes.length > same) host.lastChild.remove();
  for (const block of blocks.slice(same)) host.append(nodeOf(block, 0));
  host.shownBlocks = blocks.map((block) => block.raw);
}

/** Splits lines into blocks: {kind, lines, raw} and what a kind has besides. */
function blocksOf(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [block, end] = blockAt(lines, at);
    block.raw = lines.slice(at, end).join("\n");
    blocks.push(block);
    at = end;
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence[1], fence[2].trim());
  const heading = /^ {0,3}(#{1,6})(?:\s(.*))?$/.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, lines: [(heading[2] ?? "").trim().replace(/ #+$/, "")] }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (/^ {0,3}>/.test(line)) {
    let end = at + 1;
    while (end < lines.length && (/^ {0,3}>/.test(lines[end]) || (lines[end].trim() && !startsBlock(lines, end)))) end++;
    return [{ kind: "quote", lines: lines.slice(at, end).map((one) => one.replace(/^ {0,3}> ?/, "")) }, end];
  }
  if (ITEM.test(line)) return list(lines, at);
  if (startsTable(lines, at)) {
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|")) end++;
    return [{ kind: "table", lines: lines.slice(at, end) }, end];
  }
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end++;
  return [{ kind: "paragraph", lines: lines.slice(at, end) }, end];
}

function startsTable(lines, at) {
  return at + 1 < lines.length && lines[at].includes("|") && lines[at + 1].length < 2000 && DELIMITERS.test(lines[at + 1])
    && cellsOf(lines[at]).length === cellsOf(lines[at + 1]).length;
}

function startsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || /^ {0,3}(#{1,6}\s|>)/.test(line) || ITEM.test(line) || RULE.test(line) || startsTable(lines, at);
}

function fenced(lines, at, mark, language) {
  let end = at + 1;
  const closes = (line) => line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
  while (end < lines.length && !closes(lines[end])) end++;
  const indent = /^ */.exec(lines[at])[0].length;
  const inside = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, /^ */.exec(line)[0].length)));
  return [{ kind: "code", language, lines: inside }, Math.min(end + 1, lines.length)];
}

/** A list ends before a line that is neither indented, nor an item of the same sort, nor the rest of a paragraph. */
function list(lines, at) {
  const ordered = (line) => /\d/.test(ITEM.exec(line)[2]);
  const block = { kind: "list", ordered: ordered(lines[at]), start: parseInt(ITEM.exec(lines[at])[2], 10), items: [] };
  let end = at;
  let width = 0;
  while (end < lines.length) {
    const line = lines[end];
    const indent = line.search(/\S/);
    const item = ITEM.exec(line);
    if (item && !(block.items.length && indent >= width)) {
      if (ordered(line) !== block.ordered || RULE.test(line)) break;
      width = item[0].trimEnd().length + 1;
      block.items.push([line.slice(item[0].length)]);
    } else if (indent < 0) {
      const next = lines.slice(end, end + 8).find((one) => one.trim());
      if (next === undefined || (next.search(/\S/) < width && !ITEM.test(next))) break;
      block.items.at(-1).push("");
    } else if (indent >= width || (indent > 0 && !startsBlock(lines, end))) block.items.at(-1).push(line.slice(Math.min(indent, width)));
    else if (lines[end - 1].trim() && !startsBlock(lines, end)) block.items.at(-1).push(line);
    else break;
    end++;
  }
  return [block, end];
}

/** The cells of a table's row. `\|` is no border. */
function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function nodeOf(block, depth) {
  const text = () => inline(block.lines.join("\n"));
  if (block.kind === "rule") return element("hr");
  if (block.kind === "code") return codeBlock(block.lines.join("\n"), block.language);
  if (block.kind === "heading") return element(`h${Math.min(6, block.level + 2)}`, {}, text()); // below the page's own two
  if (block.kind === "table") return tableOf(block.lines);
  if (block.kind === "paragraph") return element("p", {}, text());
  const inside = (lines) => (depth < DEEPEST ? blocksOf(lines).map((one) => nodeOf(one, depth + 1)) : [lines.join("\n")]);
  if (block.kind === "quote") return element("blockquote", {}, ...inside(block.lines));
  const items = block.items.map((lines) => {
    const nodes = inside(lines);
    const tight = !lines.includes("") && nodes[0]?.nodeName === "P";
    return element("li", {}, ...(tight ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes));
  });
  return element(block.ordered ? "ol" : "ul", block.ordered ? { start: block.start } : {}, ...items);
}

function tableOf(lines) {
  const sides = cellsOf(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const row = (line, name) => {
    const cells = cellsOf(line);
    return element("tr", {}, ...sides.map((side, i) => element(name, side ? { className: side } : {}, inline(cells[i] ?? ""))));
  };
  const body = lines.slice(2).map((line) => row(line, "td"));
  const table = element("table", {}, element("thead", {}, row(lines[0], "th")), element("tbody", {}, ...body));
  return element("div", { className: "wide", tabIndex: 0, role: "group", "aria-label": "Table" }, table);
}

function codeBlock(text, language) {
  const copy = element("button", { type: "button", className: "small" }, "Copy");
  copy.addEventListener("click", () => copyText(text, copy));
  const head = element("div", { className: "codehead" }, element("span", {}, language.slice(0, 40)), copy);
  const code = element("pre", { tabIndex: 0, role: "group", "aria-label": `Code ${language.slice(0, 40)}` }, element("code", {}, text));
  return element("div", { className: "code" }, head, code);
}

/** Copies, and says so on the button. Outside of https and localhost browsers have no clipboard: then it is selected. */
async function copyText(text, button) {
  const said = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    const code = button.closest(".code, .message")?.querySelector("pre, .body");
    if (code) getSelection().selectAllChildren(code);
    button.textContent = "Selected: press Ctrl+C";
  }
  setTimeout(() => (button.textContent = said), 2000);
}

const TOKEN = /\\[!-/:-@[-`{-~]|`+|\*+|_+|~~|!?\[|<https?:\/\/[^\s<>]+>|https?:\/\/[^\s<>]+|\n/g;
const NAMES = { 1: "em", 2: "strong" };

/** The nodes of a text with emphasis, code, links and line breaks. */
function inline(text, linked = false) {
  const frames = [{ mark: "", nodes: [] }]; // that are open, outermost first
  const add = (...nodes) => frames.at(-1).nodes.push(...nodes);
  const brackets = text.includes("](") && !linked ? matchBrackets(text) : new Map();
  const unclosed = new Set();
  let at = 0;
  TOKEN.lastIndex = 0;
  for (let found; (found = nextToken(text, at)); ) {
    const [token] = found;
    if (found.index > at) add(text.slice(at, found.index));
    at = found.index + token.length;
    if (token === "\n") add(element("br"));
    else if (token[0] === "\\") add(token[1]);
    else if (token[0] === "`") {
      const end = unclosed.has(token) ? -1 : closingRun(text, at, token);
      if (end < 0) unclosed.add(token);
      add(end < 0 ? token : element("code", {}, text.slice(at, end).trim() || " "));
      if (end >= 0) at = end + token.length;
    } else if (token.endsWith("[")) {
      const end = linkAt(text, at, brackets, token[0] === "!", add);
      if (end < 0) add(token);
      else at = end;
    } else if (token[0] === "<") add(linkOf(token.slice(1, -1), token.slice(1, -1)));
    else if (token[0] === "h") {
      const url = linked ? token : trimUrl(token);
      add(linked ? url : linkOf(url, url));
      at = found.index + url.length;
    } else emphasis(frames, token, text[found.index - 1] ?? " ", text[at] ?? " ");
  }
  add(text.slice(at));
  while (frames.length > 1) flatten(frames);
  const fragment = document.createDocumentFragment();
  fragment.append(...frames[0].nodes.filter((node) => node !== ""));
  return fragment;
}

function nextToken(text, at) {
  TOKEN.lastIndex = at; // set each time: the expression is shared with the text of a link inside
  return TOKEN.exec(text);
}

/** Opens or closes frames by a run of marks between two characters. */
function emphasis(frames, run, before, after) {
  const word = /[\p{L}\p{N}]/u;
  const spaced = /\s/;
  const within = run[0] === "_"; // never inside a word: snake_case
  const closes = !spaced.test(before) && !(within && word.test(after));
  const opens = !spaced.test(after) && !(within && word.test(before));
  let left = run.length;
  while (closes && left && left < 4) {
    const fits = (frame) => frame.mark[0] === run[0] && frame.mark.length <= left;
    const index = frames.findLastIndex(fits);
    if (index < 1 || !frames[index].nodes.length) break;
    while (frames.length > index + 1) flatten(frames);
    const { mark, nodes } = frames.pop();
    frames.at(-1).nodes.push(element(run[0] === "~" ? "del" : NAMES[mark.length], {}, ...nodes));
    left -= mark.length;
  }
  if (!left) return;
  if (!opens || left > 3 || frames.length > 30) {
    frames.at(-1).nodes.push(run.slice(0, left));
    return;
  }
  if (left !== 2) frames.push({ mark: run[0], nodes: [] });
  if (left > 1) frames.push({ mark: run[0].repeat(2), nodes: [] });
}

/** Makes text of a frame that nothing closes. */
function flatten(frames) {
  const { mark, nodes } = frames.pop();
  frames.at(-1).nodes.push(mark, ...nodes);
}

/** Where a run of just these backticks begins, from `at`; -1 if nowhere. */
function closingRun(text, at, run) {
  for (let found = text.indexOf(run, at); found >= 0; ) {
    let end = found + run.length;
    if (text[end] !== "`") return found;
    while (text[end] === "`") end++;
    found = text.indexOf(run, end);
  }
  return -1;
}

/** From the place behind each [ to that of its ]. */
function matchBrackets(text) {
  const open = [];
  const matches = new Map();
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "\\") i++;
    else if (text[i] === "[") open.push(i + 1);
    else if (text[i] === "]" && open.length) matches.set(open.pop(), i);
  }
  return matches;
}

/** Adds the link whose text begins at `at`. Returns where it ends, -1 if there is none. Pictures are links, too: to load
 * them would tell their server of the conversation. */
function linkAt(text, at, brackets, picture, add) {
  const end = brackets.get(at);
  if (end === undefined || text[end + 1] !== "(") return -1;
  const target = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(text.slice(end + 1, end + 4000));
  if (!target) return -1;
  const shown = text.slice(at, end) || (picture ? "picture" : target[1]);
  add(linkOf(target[1], picture ? `Picture: ${shown}` : inline(shown, true)));
  return end + 1 + target[0].length;
}

function linkOf(url, shown) {
  const parsed = URL.canParse(url) ? new URL(url) : null;
  const span = element("span", {}, shown);
  if (!parsed || !["http:", "https:"].includes(parsed.protocol)) return span;
  return element("a", { href: parsed.href, target: "_blank", rel: "noopener noreferrer nofollow" }, span);
}

/** A bare address without the punctuation of the sentence around it. */
function trimUrl(url) {
  const around = url.includes("(") ? ".,;:!?'\"*_~`]" : ".,;:!?'\"*_~`])";
  let end = url.length;
  while (around.includes(url[end - 1])) end--;
  return url.slice(0, end);
}
