"""A small, real tokenizer.json in the shape of Gemma 3's: byte-pair merges, byte fallback, the same special tokens.

Ids: control tokens first, then the 256 byte tokens, single characters, merged pieces, and ``<image_soft_token>`` last,
outside of the merge vocabulary, as Gemma 3 has it. Readers look ids up by name.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dm05_prep.demo.world import TASKS

MODEL_MAX_LENGTH = 1024
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
_TURNS = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>")
_PLAIN = ("<mask>",)
IMAGE_TOKEN = "<image_soft_token>"
_MERGES = 560
_LEAST_SEEN = 2

_CONFIG = {
    "tokenizer_class": "GemmaTokenizer",
    "processor_class": "Gemma3Processor",
    "model_max_length": MODEL_MAX_LENGTH,
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "bos_token": "<bos>",
    "unk_token": "<unk>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": IMAGE_TOKEN,
}

# What the merges are learnt from: the frame of a prompt, the demo's tasks, and sentences like those of robot datasets.
_CORPUS = (
    *(f"Task: {task.text}." for task in TASKS),
    *["user\n", "model\n", "Robot: Franka\n", "Overall speed: 0.5\n", "Control mode: joint\n"] * 4,
    *["Head image: \n\n", "Left wrist image: \n\n", "Right wrist image: \n\n", "States: 0 12 34 56 78 99 127 255\n"]
    * 4,
    "Task: open the top drawer and put the bowl inside.",
    "Task: turn on the stove and put the moka pot on it.",
    "Task: pick up the book and place it in the back compartment of the caddy.",
    "Task: push the plate to the front of the stove.",
    "Task: put the wine bottle on top of the cabinet, then close the bottom drawer.",
    "Task: put both the cream cheese box and the butter in the basket.",
    "Task: put the white mug on the left plate and the yellow and white mug on the right plate.",
    "Task: stack the small green cube on the large orange cube next to the wooden tray.",
    "Task: lift the cup from the shelf, move it over the sink and release it gently.",
    "Task: slide the lid to the middle of the table and wait for the arm to stop.",
    "Task: grasp the handle, pull the door open and hand the towel to the person.",
    "Task: pick up the alphabet soup, the tomato sauce, the milk and the orange juice.",
    "Task: 把红色的方块放到盘子上。",
    "Task: 打开抽屉，把碗放进去，然后关上抽屉。",
)


def _words(text: str) -> list[str]:
    return re.findall(r"▁?[^▁\n]+|▁|\n+", text.replace(" ", "▁"))


def learn_merges(texts: tuple[str, ...], count: int) -> list[tuple[str, str]]:
    """At most ``count`` merges of the most frequent neighbouring pieces, in order; a pair never crosses a space."""
    words = {tuple(word): seen for word, seen in Counter(w for text in texts for w in _words(text)).items()}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, seen in words.items():
            for pair in pairwise(word):
                pairs[pair] += seen
        best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None or pairs[best] < _LEAST_SEEN:
            break
        merges.append(best)
        words = {_merged(word, best): seen for word, seen in words.items()}
    return merges


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    pieces: list[str] = []
    for piece in word:
        if pieces and (pieces[-1], piece) == pair:
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return tuple(pieces)


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """The files of the tokenizer, and the ids that the model's config repeats."""

    json: dict[str, Any]
    config: dict[str, Any]
    ids: dict[str, int]  # every control token by name

    @property
    def size(self) -> int:
        """Number of ids in use."""
        return self.ids[IMAGE_TOKEN] + 1


def _added(token: str, number: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **flags, "special": token not in _PLAIN}


def build_tokenizer() -> Tokenizer:
    """Learn the merges and lay out the vocabulary; the same on every machine."""
    merges = learn_merges(_CORPUS, _MERGES)
    control = (*_SPECIAL, *_PLAIN, *_TURNS)
    characters = sorted({*map(chr, range(33, 127)), *"".join(_CORPUS).replace(" ", "▁")})
    pieces = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *(a + b for a, b in merges)]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    ids = {token: vocab[token] for token in control} | {IMAGE_TOKEN: len(vocab)}
    bos = {"id": "<bos>", "type_id": 0}
    template = [{"SpecialToken": bos}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*template, {"SpecialToken": {**bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, number) for token, number in ids.items()],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": pair,
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [ids["<bos>"]], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(merge) for merge in merges],
        },
    }
    return Tokenizer(json=document, config=_CONFIG, ids=ids)
