// What is being written: the draft, which a reload keeps, the settings, and pastes that no model could read.

const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "tools"];
const CHARACTERS_PER_TOKEN = 16; // more than any text has: a longer one never fits the model

/** Says something above the field, with a button where there is something to do about it. */
function say(text, act = null) {
  $("note").hidden = !text;
  $("note").replaceChildren(text, ...(act ? [" ", button(...act)] : []));
}

function settingsOf() {
  return Object.fromEntries(SETTINGS.map((name) => [name, $(name).value]));
}

function watchComposer(send, longest) {
  const field = $("message");
  field.value = kept.read("draft") ?? "";
  const settings = kept.read("settings") ?? {};
  for (const name of SETTINGS) $(name).value = settings[name] ?? "";
  $("settings").addEventListener("input", () => kept.write("settings", settingsOf()));
  let later = 0;
  const keepDraft = () => kept.write("draft", field.value);
  field.addEventListener("input", () => {
    clearTimeout(later);
    later = setTimeout(keepDraft, 200);
  });
  addEventListener("pagehide", keepDraft);
  addEventListener("beforeunload", (event) => {
    if (document.querySelector(".editing")) event.preventDefault(); // a message that is being edited is kept nowhere
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  document.addEventListener("paste", (event) => refuseLong(event, longest()));
}

/** A text that is longer than the model's context would only make the page slow: it is not pasted, and the visitor is
 * offered its beginning. */
function refuseLong(event, most) {
  const text = event.clipboardData?.getData("text/plain") ?? "";
  if (text.length <= most || event.target.nodeName !== "TEXTAREA") return;
  event.preventDefault();
  const size = text.length.toLocaleString("en");
  const shown = most.toLocaleString("en");
  say(`The pasted text has ${size} characters: more than the model can read. Nothing was pasted; what you have written is here.`,
    [`Paste the first ${shown}`, () => {
      event.target.setRangeText(text.slice(0, most), event.target.selectionStart, event.target.selectionEnd, "end");
      event.target.dispatchEvent(new Event("input", { bubbles: true }));
      say("");
      event.target.focus();
    }]);
}
