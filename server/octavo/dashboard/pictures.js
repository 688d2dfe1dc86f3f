// The tray of pictures for the next message. A picture comes by the button, by paste or by drag and drop within the
// chat; one that is large is made smaller here, so that requests stay small. What is chosen is the component's value.
const LONGEST = 2048, MOST_BYTES = 2000000, THUMBNAIL = 160;
const KEPT = ["image/png", "image/jpeg", "image/webp", "image/gif"];  // the server reads these as they are
const area = document.getElementById("chat-area");

function drawn(bitmap, longest, quality) {
  const scale = Math.min(1, longest / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";  // JPEG is not transparent
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", quality);
}

function as_it_is(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function picture_of(file) {
  const bitmap = await createImageBitmap(file, {imageOrientation: "from-image"});
  const small = Math.max(bitmap.width, bitmap.height) <= LONGEST && file.size <= MOST_BYTES;
  const url = small && KEPT.includes(file.type) ? await as_it_is(file) : drawn(bitmap, LONGEST, 0.9);
  const thumbnail = drawn(bitmap, THUMBNAIL, 0.8);
  bitmap.close();
  return {name: file.name || "picture", url, thumbnail};
}

let queue = Promise.resolve();  // one after the other: of several that come at once none is lost, and they stay in order

function add(files) {
  for (const file of files) {
    queue = queue.then(async () => {
      const {pictures} = props.value;
      try {
        props.value = {pictures: [...pictures, await picture_of(file)], note: ""};
      } catch {
        props.value = {pictures, note: `${file.name || "the file"} is no picture that this browser can read`};
      }
    });
  }
}

function pictures_in(transfer) {
  return [...(transfer ? transfer.files : [])].filter(file => file.type.startsWith("image/"));
}

element.addEventListener("click", event => {
  const button = event.target.closest("button");
  if (!button) return;
  if (!button.dataset.remove) return element.querySelector("input").click();
  const index = Number(button.dataset.remove);
  props.value = {pictures: props.value.pictures.filter((_, i) => i !== index), note: ""};
  requestAnimationFrame(() => element.querySelector("[data-attach]").focus());  // what had the focus is gone
});
element.addEventListener("change", event => {
  add(event.target.files);
  event.target.value = "";  // the same file may be chosen again
});
for (const kind of ["paste", "drop"]) {
  area.addEventListener(kind, event => {
    const files = element.isConnected ? pictures_in(event.clipboardData || event.dataTransfer) : [];
    if (!files.length) return;
    event.preventDefault();
    add(files);
  });
}
area.addEventListener("dragover", event => {
  if (element.isConnected && [...event.dataTransfer.items].some(item => item.kind === "file")) event.preventDefault();
});
