"""Paths of pictures in a message, however a terminal or a person writes them."""

from __future__ import annotations

import re
import shlex
from base64 import b64decode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.cli import pictures
from octavo.cli.pictures import Message, data_url, read_message
from octavo.errors import OctavoError

NAMES = st.text("ab é'\"()&;$漢\\", min_size=1, max_size=12).filter(lambda name: name.strip() == name)
NOTATIONS = {
    "quoted, as by GNOME": lambda path: "'" + str(path).replace("'", "'\\''") + "'",
    "of a shell": lambda path: shlex.quote(str(path)),
    "escaped, as by macOS": lambda path: re.sub(r"([^\w/.-])", r"\\\1", str(path)),
    "an address": lambda path: path.as_uri(),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAMES, st.sampled_from([".png", ".JPG", ".webp"]), st.sampled_from([*NOTATIONS]), st.booleans())
def test_every_notation_finds_the_file(tmp_path, name, ending, notation, alone):
    path = tmp_path / (name + ending)
    path.write_bytes(b"x")
    written = NOTATIONS[notation](path)
    if alone:
        assert read_message(f" {written} ") == Message("", (path,))
    else:
        assert read_message(f"What is in {written}") == Message(f"What is in {path.name}", (path,))


def test_several_pictures_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.png", "b c.jpg"):
        (tmp_path / name).write_bytes(name.encode())
    said = read_message('Is "b c.jpg" like ~/a.png, or a.png?')
    assert said.text == "Is b c.jpg like a.png, or a.png?"
    assert [path.read_bytes() for path in said.pictures] == [b"b c.jpg", b"a.png", b"a.png"]
    assert b64decode(data_url(said.pictures[0]).removeprefix("data:image/jpeg;base64,")) == b"b c.jpg"


@pytest.mark.parametrize("text", ["", "It's 'so' ", "a.png is a name", "what's in http://x.example/a.png?", "'a.png"])
def test_what_is_no_file_stays_text(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_message(text).text == text and not read_message(text).pictures


def test_a_path_that_leads_nowhere_is_told(tmp_path):
    assert read_message(f"see {tmp_path}/gone.png.").missing == (f"{tmp_path}/gone.png",)


def test_a_picture_that_cannot_be_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "MAX_BYTES", 3)
    (tmp_path / "a.png").write_bytes(b"1234")
    with pytest.raises(OctavoError, match="scale the picture down"):
        data_url(tmp_path / "a.png")
    with pytest.raises(OctavoError, match="cannot read"):
        data_url(tmp_path / "gone.png")


@pytest.mark.parametrize("pattern", [".", "'a ", '"a ', "\\", "'\\''"])
def test_a_hostile_paste_is_read_in_linear_time(pattern):
    """The work a character does not grow with the text: a thousand times as much text takes no more than seconds."""
    assert not read_message(pattern * 200_000 + " x.png").pictures
