// Pictures of the next message: chosen, pasted or dropped. A large one is made smaller here, so that requests stay small.

const LONGEST = 2048; // pixels of a side
const MOST_BYTES = 2_000_000;
const KEPT_AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // every server reads these
const tray = { pictures: [], reads: false, modelName: "" };
let adding = Promise.resolve(); // one after the other: they stay in order

/** Takes files in, or says why not. */
function addPictures(files) {
  if (!tray.reads) {
    say(`${tray.modelName || "This model"} reads no pictures. Ask without them, or serve a model with vision.`);
    return;
  }
  for (const file of files) {
    adding = adding.then(async () => {
      try {
        tray.pictures.push(await pictureOf(file));
        say("");
      } catch {
        say(`${file.name || "The file"} is no picture that this browser can read.`);
      }
      showTray();
    });
  }
}

async function pictureOf(file) {
  const bitmap = await createImageBitmap(file);
  const fits = Math.max(bitmap.width, bitmap.height) <= LONGEST && file.size <= MOST_BYTES;
  if (fits && KEPT_AS_THEY_ARE.includes(file.type)) return readAsUrl(file);
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas", { width: Math.ceil(bitmap.width * scale), height: Math.ceil(bitmap.height * scale) });
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function readAsUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

function showTray() {
  const remove = (index) => {
    tray.pictures.splice(index, 1);
    showTray();
    $("message").focus();
  };
  $("pictures").replaceChildren(...tray.pictures.map((src, index) => element("div", {},
    element("img", { src, className: "thumb", alt: `Picture ${index + 1}` }), button(`Remove picture ${index + 1}`, () => remove(index)))));
  $("pictures").className = tray.pictures.length ? "thumbs" : "";
}

function watchPictures() {
  const chat = $("chat");
  const filesOf = (transfer) => [...(transfer?.files ?? [])];
  $("attach").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", () => {
    addPictures($("files").files);
    $("files").value = ""; // the same file may be chosen again
  });
  for (const kind of ["paste", "drop"]) {
    chat.addEventListener(kind, (event) => {
      chat.classList.remove("dragged");
      const given = event.clipboardData ?? event.dataTransfer;
      const files = filesOf(given);
      if (!files.length || (kind === "paste" && given.getData("text/plain"))) return; // a table's text, not its picture
      event.preventDefault();
      addPictures(files);
    });
  }
  chat.addEventListener("dragover", (event) => {
    if (![...event.dataTransfer.items].some((item) => item.kind === "file")) return;
    event.preventDefault();
    chat.classList.add("dragged");
  });
  chat.addEventListener("dragleave", () => chat.classList.remove("dragged"));
}
