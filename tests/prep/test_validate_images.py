"""Images and packs through deep validation: every kind of fault with its text."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from dm05_prep.index import build_index
from dm05_prep.pack import build_pack
from dm05_prep.validate import validate
from dm05_prep.validate.image_checks import check_image
from dm05_schemas.errors import DataError
from dm05_schemas.findings import KINDS
from dm05_schemas.image import decode_rgb
from dm05_schemas.workspace import Workspace
from PIL import Image
from whole_dataset import SPEC, URL, C, Change, J, encoded, found, longer_episode, make_dataset, picture
from workspaces import make_frame, write_lines


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return make_dataset(tmp_path)


def put(data: bytes) -> Change:
    """Other bytes in place of one picture."""
    return lambda workspace: picture(workspace).write_bytes(data)


def wrong_case(workspace: Workspace) -> None:
    picture(workspace).rename(picture(workspace).with_name("000001.JPG"))


def other_unicode_form(workspace: Workspace) -> None:
    frames = [make_frame("é" if n else "episode_000", n, [0.0] * 4, [0.0] * 3) for n in range(3)]
    write_lines(SPEC.root(workspace) / J, frames)
    shutil.copytree(SPEC.images(workspace) / "episode_000", SPEC.images(workspace) / "e\u0301")


def dangling(workspace: Workspace) -> None:
    picture(workspace).unlink()
    picture(workspace).symlink_to("nowhere.jpg")


def folder_for_file(workspace: Workspace) -> None:
    picture(workspace).unlink()
    picture(workspace).mkdir()


IMAGES: dict[str, tuple[Change, list[tuple[str, str]]]] = {
    "missing": (
        lambda w: picture(w).unlink(),
        [("image-missing", f'{J}:2: images_1: there is no "episode_000/camera_0/000001.jpg"')],
    ),
    "wrong case": (
        wrong_case,
        [("image-case", f'{J}:2: images_1: "{URL}" is "{URL[:-3]}JPG" on disk')],
    ),
    "symlink to nothing": (
        dangling,
        [("broken-link", f'{J}:2: images_1: "{URL}" is a symlink to nothing')],
    ),
    "folder": (
        folder_for_file,
        [("image-missing", f'{J}:2: images_1: "{URL}" is a folder')],
    ),
    "empty": (put(b""), [("image-empty", f"{C}: is empty (images_1 of episode_000.jsonl:2)")]),
    "HTML": (
        put(b"\r\n<!DOCTYPE html><html>404</html>"),
        [("image-foreign", f"{C}: is HTML or XML, not an image (images_1 of episode_000.jsonl:2)")],
    ),
    "JSON": (put(b'{"e": 1}'), [("image-foreign", f"{C}: is JSON, not an image (images_1 of episode_000.jsonl:2)")]),
    "LFS pointer": (
        put(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        [("image-foreign", f"{C}: is a Git LFS pointer, not an image (images_1 of episode_000.jsonl:2)")],
    ),
    "noise": (
        put(b"\x01\x02\x03\x04\x05\x06\x07\x08\x09"),
        [("image-broken", f"{C}: cannot be decoded: not an image (9 bytes, begins "
          r"b'\x01\x02\x03\x04\x05\x06\x07\x08') (images_1 of episode_000.jsonl:2)")],
    ),
    "truncated": (
        put(encoded()[:-100]),
        [("image-truncated", f"{C}: is cut short: {len(encoded()) - 100} bytes do not reach the end of the picture "
          "(images_1 of episode_000.jsonl:2)")],
    ),
    "truncated in the header": (
        put(encoded()[:50]),
        [("image-truncated", f"{C}: is cut short: 50 bytes do not hold a whole header "
          "(images_1 of episode_000.jsonl:2)")],
    ),
    "truncated PNG": (
        put(encoded("PNG")[:-500]),
        [
            ("image-truncated", f"{C}: is cut short: {len(encoded('PNG')) - 500} bytes do not reach the end of the "
             "picture (images_1 of episode_000.jsonl:2)"),
            ("image-extension", f'{C}: is PNG, its name ends in ".jpg" (images_1 of episode_000.jsonl:2)'),
        ],
    ),
    "wrong extension": (
        put(encoded("PNG")),
        [("image-extension", f'{C}: is PNG, its name ends in ".jpg" (images_1 of episode_000.jsonl:2)')],
    ),
    "grey": (
        put(encoded(mode="L")),
        [("image-mode", f"{C}: is greyscale, it is converted to RGB (images_1 of episode_000.jsonl:2)")],
    ),
    "CMYK": (
        put(encoded(mode="CMYK")),
        [("image-mode", f"{C}: is CMYK, it is converted to RGB (images_1 of episode_000.jsonl:2)")],
    ),
    "palette": (
        put(encoded("PNG", "P")),
        [
            ("image-mode", f"{C}: is palette, it is converted to RGB (images_1 of episode_000.jsonl:2)"),
            ("image-extension", f'{C}: is PNG, its name ends in ".jpg" (images_1 of episode_000.jsonl:2)'),
        ],
    ),
    "RGBA": (
        put(encoded("PNG", "RGBA")),
        [
            ("image-mode", f"{C}: is RGBA, it is converted to RGB (images_1 of episode_000.jsonl:2)"),
            ("image-extension", f'{C}: is PNG, its name ends in ".jpg" (images_1 of episode_000.jsonl:2)'),
        ],
    ),
    "16 bit": (
        put(encoded("PNG", "I;16")),
        [
            ("image-depth", f"{C}: has more than 8 bits a channel (mode I;16) (images_1 of episode_000.jsonl:2)"),
            ("image-extension", f'{C}: is PNG, its name ends in ".jpg" (images_1 of episode_000.jsonl:2)'),
        ],
    ),
    "another size": (
        put(encoded(size=(24, 32))),
        [("image-size", f"{J}: 1 image of images_1 is 24x32, most are 32x24")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGES)
def test_images(workspace: Workspace, name: str) -> None:
    change, expected = IMAGES[name]
    change(workspace)
    assert found(workspace) == expected


def test_another_unicode_form_of_a_name(workspace: Workspace) -> None:
    other_unicode_form(workspace)
    build_index(workspace, SPEC)
    kinds = [kind for kind, _ in found(workspace)]
    assert kinds.count("image-case") == 4 and set(kinds) == {"image-case", "stats-stale"}


def test_first_and_last_images_are_missed_by_the_fast_check_too(workspace: Workspace) -> None:
    shutil.rmtree(SPEC.images(workspace) / "episode_001")
    assert found(workspace, deep=False) == [
        ("image-missing", f'jsonl/episode_001.jsonl:{line}: {camera}: there is no "episode_001/camera_{n}/{f:06d}.jpg"')
        for line, f in ((1, 0), (4, 3))
        for n, camera in ((0, "images_1"), (1, "images_2"))
    ]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_what_the_decoder_refuses_is_found_and_the_reverse(kind: str, mode: str) -> None:
    whole = encoded(kind, mode)
    for data in [whole, whole + b"\0" * 99, *(whole[: len(whole) * part // 20] for part in range(1, 20))]:
        try:
            decode_rgb(data)
            refused = False
        except DataError:
            refused = True
        _, problems = check_image(data, "x", decode=True)
        assert any(KINDS[problem.kind].severity == "error" for problem in problems) == refused
        if kind in ("JPEG", "PNG"):
            _, problems = check_image(data, "x", decode=False)
            assert any(KINDS[problem.kind].severity == "error" for problem in problems) == refused


def test_a_picture_that_is_broken_inside_is_found_by_decoding(workspace: Workspace) -> None:
    data = bytearray(encoded())
    data[700:720] = b"\xff\xd9" * 10
    picture(workspace).write_bytes(bytes(data))
    assert found(workspace) == []
    [(kind, text)] = found(workspace, decode=True)
    assert kind == "image-broken" and text.startswith(f"{C}: cannot be decoded: broken JPEG")


@pytest.mark.parametrize("kind", ["BMP", "GIF", "TIFF", "PPM", "JPEG2000"])
def test_formats_whose_end_is_not_known_are_decoded(kind: str) -> None:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, kind)
    data = buffer.getvalue()
    assert check_image(data, None, decode=False)[1] == check_image(data, None, decode=True)[1]
    for length in (len(data) // 2, len(data) - 40):
        (problem,) = [item for item in check_image(data[:length], None, decode=False)[1] if item.kind != "image-mode"]
        assert problem.kind == "image-broken"
        with pytest.raises(DataError):
            decode_rgb(data[:length])


def test_a_url_that_no_file_can_have(workspace: Workspace) -> None:
    for kind in ("image", "video"):
        lines = (SPEC.root(workspace) / J).read_text().splitlines()
        frame = json.loads(lines[0])
        frame["images_1"] = {"type": kind, "url": "x" * 300 + ".jpg", "frame_idx": 0}
        (SPEC.root(workspace) / J).write_text("\n".join([json.dumps(frame), *lines[1:], ""]))
        for deep in (False, True):
            kinds = {item.kind for item in validate(workspace, SPEC, deep=deep).findings}
            assert kinds & {"image-missing", "unreadable"}


def test_the_only_image_that_is_missing_is_not_said_to_be_there(workspace: Workspace) -> None:
    assert validate(workspace, SPEC, deep=True).findings == ()
    url = "episode_000/camera_0/000001.jpg"
    (SPEC.images(workspace) / url.replace("000001", "000002")).unlink()
    validate(workspace, SPEC, deep=True)  # the folder's names are known now
    (SPEC.images(workspace) / url).unlink()
    texts = [item.detail for item in validate(workspace, SPEC, deep=True).findings]
    assert f'images_1: there is no "{url}"' in texts


def test_a_pack_alone(workspace: Workspace) -> None:
    build_pack(workspace, SPEC)
    shutil.rmtree(SPEC.images(workspace))
    shutil.rmtree(SPEC.jsonl(workspace))
    for deep in (False, True):
        report = validate(workspace, SPEC, deep=deep)
        assert report.findings == ()
        assert (report.episodes, report.frames, report.images) == (2, 7, 14 if deep else 0)
    (next((SPEC.root(workspace) / "pack").glob("*.bin"))).unlink()
    assert [item.kind for item in validate(workspace, SPEC).findings] == ["pack-broken"]


def test_a_sample_of_the_images(workspace: Workspace) -> None:
    for path in SPEC.images(workspace).rglob("*.jpg"):
        path.unlink()
    report = validate(workspace, SPEC, deep=True, sample=3)
    assert (report.frames, report.images, len(report.findings)) == (7, 6, 6)
    assert validate(workspace, SPEC, deep=True, sample=3).findings == report.findings
    assert validate(workspace, SPEC, deep=True, sample=99).images == 14


def test_images_through_a_symlinked_folder(workspace: Workspace, tmp_path: Path) -> None:
    pool = tmp_path / "pool with spaces 图"
    SPEC.images(workspace).rename(pool)
    SPEC.images(workspace).symlink_to(pool)
    assert found(workspace) == []


def packed(workspace: Workspace) -> Path:
    """The dataset as a pack alone: its image folder is gone."""
    build_pack(workspace, SPEC)
    shutil.rmtree(SPEC.images(workspace))
    return SPEC.root(workspace) / "pack"


def test_a_pack_in_place_of_images(workspace: Workspace) -> None:
    packed(workspace)
    report = validate(workspace, SPEC, deep=True, decode=True)
    assert report.findings == () and report.images > 0
    assert validate(workspace, SPEC).findings == ()


def test_a_pack_beside_images(workspace: Workspace) -> None:
    """Each picture counts once, both places are looked at, and a finding says in which of them something is wrong."""
    build_pack(workspace, SPEC)
    for sample, images in ((None, 14), (3, 6)):
        assert validate(workspace, SPEC, deep=True, sample=sample).images == images
    [blob] = (SPEC.root(workspace) / "pack").glob("*.bin")
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    picture(workspace).write_bytes(b"")
    at_file, at_blob = found(workspace)
    assert at_file == ("image-empty", f"{C}: is empty (images_1 of episode_000.jsonl:2)")
    assert at_blob[0] == "pack-broken" and at_blob[1].startswith(f"pack/{blob.name}: the image was changed since")
    assert validate(workspace, SPEC, deep=True).images == 14


def test_a_changed_blob(workspace: Workspace) -> None:
    for number, path in enumerate(sorted(SPEC.images(workspace).rglob("*.jpg"))):
        path.write_bytes(encoded(seed=number))
    folder = packed(workspace)
    [blob] = folder.glob("*.bin")
    data = bytearray(blob.read_bytes())
    data[len(encoded()) // 2] ^= 1
    blob.write_bytes(data)
    [(kind, text)] = found(workspace)
    changed = (
        rf"pack/{blob.name}: the image was changed since it was packed \(images_[12] of episode_00[01].jsonl:[1-4]\)"
    )
    assert kind == "pack-broken" and re.fullmatch(changed, text)
    assert found(workspace, deep=False) == []
    blob.write_bytes(data[:-1])
    text = f"part of the pack, has {len(data) - 1:,} bytes where {len(data):,} were written"
    assert found(workspace) == found(workspace, deep=False) == [("pack-broken", f"pack/{blob.name}: {text}")]


def test_a_changed_table(workspace: Workspace) -> None:
    table = packed(workspace) / "frames.arrow"
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    assert [kind for kind, _ in found(workspace)] == ["pack-broken"]


def test_a_pack_of_other_episodes(workspace: Workspace) -> None:
    packed(workspace)
    longer_episode(workspace)
    build_index(workspace, SPEC)
    assert [kind for kind, _ in found(workspace, deep=False)] == ["stats-stale", "pack-broken"]


def film(path: Path, frames: int) -> Path:
    """A small video of so many frames."""
    av = pytest.importorskip("av")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(frames):
            picture = av.VideoFrame.from_ndarray(np.full((32, 32, 3), number * 9, dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return path


def test_videos(workspace: Workspace) -> None:
    videos = SPEC.images(workspace)
    film(videos / "good.mp4", 3)
    film(videos / "short.mp4", 2)
    (videos / "noise.mp4").write_bytes(b"no video" * 99)
    for name in ("good", "short", "noise", "gone"):
        view = {"type": "video", "url": f"./{name}.mp4"}
        frames = [
            make_frame(name, n, [0.0] * 4, [0.0] * 3, **{key: view | {"frame_idx": n} for key in SPEC.image_keys})
            for n in range(3)
        ]
        write_lines(SPEC.jsonl(workspace) / f"{name}.jsonl", frames)
    build_index(workspace, SPEC)
    held = [(kind, text) for kind, text in found(workspace) if kind != "stats-stale"]
    assert held[0] == ("image-missing", 'jsonl/gone.jsonl:3: images_1: there is no "gone.mp4"')
    assert held[1][0] == "video-broken" and held[1][1].startswith("image/noise.mp4: cannot read the video: ")
    assert held[2:] == [
        ("video-broken", "image/short.mp4: has 2 frames, frame_idx 2 is not there (images_1 of short.jsonl:3)"),
    ]  # fmt: skip
