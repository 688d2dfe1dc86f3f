"""A row of the table of formats holds the texts that a family of models writes around calls, names and arguments,
and how the arguments are spelled. Plain data: one reader for each kind of arguments works from it."""

from __future__ import annotations

from dataclasses import dataclass

JSON_WORDS = ("true", "false", "null")
PYTHON_WORDS = ("True", "False", "None")


@dataclass(frozen=True)
class Json:
    """One object with the name and the arguments, or a list of such objects."""

    name_key: str = "name"
    arguments_key: str = "arguments"
    listed: bool = False  # the family writes a list even for one call; both are read


@dataclass(frozen=True)
class JsonKey:
    """A list of objects whose only key is the name: ``[{"f": {...}}]``."""


@dataclass(frozen=True)
class Named:
    """JSON behind a name that stands outside of it."""

    lead: str = ""  # in front of the JSON, as the family writes it
    tail: str = ""  # behind it
    or_listed: bool = False  # older models of the family write a list of objects, which is read, too


@dataclass(frozen=True)
class Params:
    """Arguments one by one between tags, texts to the letter and all else as JSON."""

    key: str
    key_end: str
    value_end: str
    value: str = ""  # in front of a value
    newline: str = ""  # what the model writes between tags
    trims: bool = False  # one newline at both ends of a value belongs to the tags
    kind_end: str = ""  # behind `key_end` stands the value's kind, and then this
    text_kind: str = "true"  # the kind of a text
    cdata: bool = False  # values may stand in ``<![CDATA[...]]>``


@dataclass(frozen=True)
class Python:
    """Calls as Python writes them, in a list or one a line."""

    lines: bool = False
    as_json: bool = False  # values are JSON


@dataclass(frozen=True)
class Typed:
    """An object with bare keys, its texts between two quotes that are a token: Gemma."""

    quote: str


@dataclass(frozen=True)
class Elements:
    """Nested tags, each with a text in front that no value has; ``item`` is an element of a list: MiniMax M3."""

    mark: str


@dataclass(frozen=True)
class Harmony:
    """Messages with channels and recipients, which have a reader of their own: gpt-oss."""


@dataclass(frozen=True)
class Gaps:
    """Texts that one template writes between a row's, most of them white space, and how it writes objects."""

    between: str = ""  # two calls
    opened: str = ""  # a section's begin and its first call
    closed: str = ""  # its last call and its end
    named: str = ""  # a header and the first argument
    bare: str = ""  # a header and the end of a call without arguments
    valued: str = ""  # the end of a key and what stands in front of its value
    after: str = ""  # an argument and the next one
    ended: str = ""  # the last argument and the end of a call
    comma: str = ", "  # between objects of a list
    bracket: str = ""  # a list's bracket and its first object
    last: str = ""  # its last object and its bracket
    object: str = ""  # an object of a call, with {name}, {arguments}, perhaps {id} or {index}
    words: tuple[str, str, str] = JSON_WORDS  # an argument that is true, false or null
    writes_null: bool = True  # False: an argument that is null is left out
    python: bool = False  # lists and objects between tags are as Python writes them
    counted: int = 0  # the number of a conversation's first call
    counts_on: bool = True  # numbers go on in the next turn


Arguments = Json | JsonKey | Named | Params | Python | Typed | Elements | Harmony


@dataclass(frozen=True)
class Format:
    """The texts by which a family of models writes calls. A text is "" where the family writes none."""

    name: str  # vLLM's, where it has one
    arguments: Arguments
    section: tuple[str, str] = ("", "")  # around all calls of a turn
    ends_section: bool = True  # False: the model ends its answer instead
    each: bool = False  # a section holds one call, as the model writes it
    call: str = ""  # in front of a call
    header: str = "{name}"  # behind `call`: literals, the name, perhaps an {id} or {index}; "(...)?" may be missing
    call_end: str = ""
    between: str = ""  # what the model writes between calls
    separators: str = ""  # characters that may stand between calls
    also: tuple[str, ...] = ()  # other texts with which calls begin, perhaps with a tool's {name}
    addressed: str = ""  # in front of a message to a tool, with its {name}; no content
    begun: str = ""  # the prompt has written `call`: in front of an answer without calls the model writes this
    begins: str = ""  # the character with which an answer begins that is calls without a marker
    known_only: bool = False  # only names of offered tools make a call
    thoughts: tuple[str, str] = ("", "")  # around thoughts, where they are not <think>
    texts: tuple[str, ...] = ()  # marks around other text, which are no content
    suffix: str = ""  # a part of all marks in place of which templates write others
    special: bool = False  # the markers are special tokens of the model
    id_length: int = 0  # of ids that the templates demand; 0: any
    escapes: bool = False  # names stand in quotes, with &quot; and &amp; for these two signs
    keeps_ids: bool = False  # the header's name and number are the id of the call
    gaps: Gaps | None = None  # those of the model's template, a grammar allows no others; None: unknown
    aliases: tuple[str, ...] = ()  # other names

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts with which calls may begin."""
        own = self.section[0] or self.call
        return (*((own,) if own else ()), *self.also)

    def attribute(self, name: str) -> str:
        """A name of a tool or an argument, as the family writes it."""
        return name.replace("&", "&amp;").replace('"', "&quot;") if self.escapes else name

    def name_of(self, attribute: str) -> str:
        """The name that the family writes so."""
        return attribute.replace("&quot;", '"').replace("&amp;", "&") if self.escapes else attribute

    @property
    def spaces(self) -> Gaps:
        """The gaps, as the family writes them where the template's own are unknown."""
        if self.gaps is not None:
            return self.gaps
        if isinstance(self.arguments, Params):
            new = self.arguments.newline
            own = new if self.section[0] else self.between
            return Gaps(own, new, new, named=new, bare=new, after=new, ended=new)
        around = self.between if self.section[0] else ""
        return Gaps(self.between, around, around)

    @property
    def listed(self) -> bool:
        """True if a turn's calls are one list of objects."""
        return isinstance(self.arguments, JsonKey) or (isinstance(self.arguments, Json) and self.arguments.listed)

    @property
    def around(self) -> tuple[str, str]:
        """The section as the family writes it."""
        if self.begins and not self.listed:
            return "", ""
        return self.section[0], self.section[1] if self.ends_section else ""

    @property
    def layout(self) -> str:
        """Return how an object of a call is written; "" where calls are no objects."""
        match self.arguments:
            case Json(name_key=name, arguments_key=arguments):
                own = f'{{"{name}": {{name}}, "{arguments}": {{arguments}}}}'
                return self.gaps.object or own if self.gaps is not None else own
            case JsonKey():
                return "{{name}: {arguments}}"
        return ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that separate thoughts and other text."""
        return tuple(mark for mark in (*self.thoughts, *self.texts) if mark)
