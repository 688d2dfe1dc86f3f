// The tab with a map of the KV cache: a cell for each block, read every second while somebody looks.

const KINDS = [ // of blocks: what they are called and their colour
  ["free", [226, 232, 240]], ["cached, not full", [191, 219, 254]], ["cached", [96, 165, 250]],
  ["used, growing", [134, 217, 201]], ["used", [13, 148, 136]], ["shared by 2", [196, 181, 253]],
  ["shared by 3", [139, 92, 246]], ["shared by 4 or more", [91, 33, 182]], ["of this chat's answer", [249, 115, 22]],
];
const HOLDERS = 0x3f; // of a block's byte: how many sequences hold it; then whether it is cached, and whether in part
const CACHED = 0x40;
const PARTIAL = 0x80;

function kindOf(cell) {
  const holders = cell & HOLDERS;
  if (!holders) return cell & CACHED ? (cell & PARTIAL ? 1 : 2) : 0;
  if (holders === 1) return cell & CACHED && !(cell & PARTIAL) ? 4 : 3;
  return 3 + Math.min(holders, 4);
}

/** Shows the map, once. `answerId`: of the answer whose blocks are marked. */
async function showMemory(answerId) {
  const host = $("memory");
  let found;
  try {
    found = await (await call(`octavo/blocks${answerId ? `?request_id=${encodeURIComponent(answerId)}` : ""}`)).json();
  } catch (error) {
    const elsewhere = "The map is on this server's management port (--management-port), for operators: octavo dashboard shows it.";
    host.replaceChildren(element("p", {}, error.status === 404 ? elsewhere : error.message));
    return;
  }
  if (!found.num_blocks) {
    host.replaceChildren(element("p", {}, "This model has no KV cache: it embeds texts, and writes none."));
    return;
  }
  const cells = Uint8Array.from(atob(found.cells), (one) => one.charCodeAt(0));
  const kinds = cells.map(kindOf);
  for (const block of (found.block_ids ?? []).flat()) kinds[block - 1] = KINDS.length - 1;
  const count = (number) => number.toLocaleString("en");
  const saved = cells.reduce((sum, cell) => sum + Math.max(0, (cell & HOLDERS) - 1), 0);
  const waste = found.used ? (100 * found.unfilled) / (found.used * found.block_size) : 0;
  const words = `${count(found.num_blocks)} blocks: ${count(found.used)} used, ${count(found.cached)} cached, ${count(found.free)} free`;
  host.replaceChildren(
    element("h2", {}, "Blocks of the KV cache"),
    element("p", {}, `${words}. A cell is a block of ${found.block_size} tokens.`),
    drawMap(kinds, words),
    legendOf(kinds),
    element("p", {}, `Sharing saves ${count(saved)} blocks. Of the places in used blocks ${waste.toFixed(1)} % have no token yet.`),
  );
}

function drawMap(kinds, words) {
  const columns = Math.max(1, Math.min(kinds.length, Math.max(64, Math.floor(Math.sqrt(4 * kinds.length)))));
  const map = element("canvas", { className: "map", width: columns, height: Math.ceil(kinds.length / columns), role: "img", "aria-label": words });
  const context = map.getContext("2d");
  const picture = context.createImageData(map.width, map.height);
  kinds.forEach((kind, i) => picture.data.set([...KINDS[kind][1], 255], 4 * i));
  context.putImageData(picture, 0, 0);
  return map;
}

function legendOf(kinds) {
  const counts = KINDS.map(() => 0);
  for (const kind of kinds) counts[kind]++;
  const items = KINDS.map(([name, colour], kind) => {
    const square = element("i");
    square.style.background = `rgb(${colour})`;
    return element("li", {}, square, `${name} ${counts[kind].toLocaleString("en")}`);
  });
  return element("ul", { className: "legend" }, ...items.filter((_, kind) => counts[kind] || kind < 5));
}
