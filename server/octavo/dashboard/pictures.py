"""Pictures in the chat: the tray beside the message, what of it goes to the server, and how a question shows them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

import gradio as gr

from octavo.errors import OctavoError

CSS = """
.octavo-pictures ul { display: flex; flex-wrap: wrap; gap: .5rem; list-style: none; margin: 0; padding: 0; }
.octavo-pictures li { position: relative; }
.octavo-pictures img, .octavo-picture { height: 5rem; max-width: 10rem; object-fit: cover; border-radius: .4rem;
  display: inline-block; margin: 0 .5rem 0 0; }
#chat .octavo-picture { display: inline-block !important; width: auto !important; }
.octavo-pictures button { border: 1px solid var(--border-color-primary); border-radius: .4rem; padding: .15rem .7rem;
  background: var(--background-fill-secondary); font-size: .85rem; cursor: pointer; }
.octavo-pictures li button { position: absolute; top: -.4rem; right: .1rem; width: 1.5rem; height: 1.5rem; padding: 0;
  border-radius: 50%; line-height: 1; }
.octavo-pictures p:empty { display: none; }
"""
_TEMPLATE = """
<div class="octavo-pictures">
<ul aria-label="Pictures for the next message">{{#each value.pictures}}<li><img src="{{this.thumbnail}}"
  alt="{{this.name}}"><button type="button" data-remove="{{@index}}" aria-label="Remove {{this.name}}">×</button>
</li>{{/each}}</ul>
<button type="button" data-attach="1">Attach a picture</button>
<input type="file" accept="image/*" multiple hidden aria-label="Pictures">
<p class="octavo-figures" role="status">{{value.note}}</p>
</div>
"""
EMPTY: dict[str, Any] = {"pictures": [], "note": ""}
_THUMBNAIL = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]*")
_MOST = 64  # pictures of one message: the server's own limits are below


@dataclass(frozen=True)
class Picture:
    """``url`` and ``thumbnail``: data: addresses."""

    name: str
    url: str
    thumbnail: str


def tray() -> gr.HTML:
    """The component, hidden until the model is known to read images."""
    script = resources.files("octavo.dashboard").joinpath("pictures.js").read_text()
    return gr.HTML(EMPTY, html_template=_TEMPLATE, js_on_load=script, visible=False, elem_id="pictures")


def pictures_of(value: Any) -> list[Picture]:
    """Return the images that the browser reports in the tray. Raises OctavoError."""
    found = value.get("pictures") if isinstance(value, dict) else None
    try:
        pictures = [Picture(str(one["name"]), one["url"], one["thumbnail"]) for one in found or ()]
        for one in pictures:
            if not one.url.startswith("data:image/") or not _THUMBNAIL.fullmatch(one.thumbnail):
                raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise OctavoError("the pictures cannot be read: attach them again") from None
    if len(pictures) > _MOST:
        raise OctavoError(f"{len(pictures)} pictures are too many for a message: at most {_MOST}")
    return pictures


def content_of(question: str, pictures: list[Picture]) -> Any:
    """A message of the user, as the API takes it: text alone where there is no picture."""
    if not pictures:
        return question
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": one.url}} for one in pictures]
    return [*parts, {"type": "text", "text": question}] if question.strip() else parts


def shown(question: str, pictures: list[Picture]) -> str:
    """The pictures as Markdown."""
    images = "".join(f'<img class="octavo-picture" src="{one.thumbnail}" alt="{escape(one.name)}">' for one in pictures)
    return f"<p>{images}</p>\n\n{question}" if images else question
