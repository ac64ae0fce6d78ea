"""Putting text into HTML: escaping, and the language of prompts."""

from __future__ import annotations

import re
from html import escape

from dm05_prep.report.pictures import Picture

LONGEST = 300
_CHINESE = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")
_JAPANESE = re.compile(r"[\u3040-\u30ff]")
_KOREAN = re.compile(r"[\uac00-\ud7af]")
_INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def text(value: object) -> str:
    """Any text, safe inside an element or a quoted attribute; control and invisible characters become visible."""
    visible = _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", str(value))
    return escape(visible, quote=True)


def prompt(value: str) -> str:
    """A prompt, marked with its language where the glyphs of a character depend on it; the end of a long one is cut."""
    if len(value) > LONGEST:
        value = value[:LONGEST] + " …"
    shown = text(value) if value.strip() else '<i class="faint">(empty prompt)</i>'
    for pattern, language in ((_JAPANESE, "ja"), (_KOREAN, "ko"), (_CHINESE, "zh-Hans")):
        if pattern.search(value):
            return f'<span lang="{language}">{shown}</span>'
    return shown


def picture(item: Picture, about: str) -> str:
    """An image element, or a hatched tile that says why there is none."""
    if item.data is None:
        return f'<div class="hole" title="{text(about)}">{text(item.problem)}</div>'
    return f'<img src="{item.data}" alt="{text(about)}" title="{text(about)}">'


def plural(count: int, noun: str) -> str:
    """``1 episode``, ``1,693 episodes``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
