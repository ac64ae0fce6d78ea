"""Where a full-size step's time goes on one GPU: attention variants, the optimizer, and the whole step by kind of kernel."""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import torch

from dm05_train.model.config import DM05Config
from dm05_train.model.dm05 import DM05
from dm05_train.model.noise import draw
from dm05_train.model.weights import freeze_untrained, generate_weights
from dm05_train.perf.graphs import GraphedBackward
from dm05_train.perf.merge import remove_syncs
from dm05_train.perf.restructure import restructure

KINDS = (
    ("matmul", r"gemm|nvjet|cutlass|xmma|gemv|splitK"),
    ("attention", r"fmha|flash|cudnn.*sdpa|attention|sdpa"),
    ("optimizer", r"adamw|square_sum"),
    ("copy", r"memcpy|memset|copy|cat"),
    ("pointwise", r".*"),
)


def fake_batch(config: DM05Config, size: int, prefix: int, device: torch.device) -> dict[str, torch.Tensor]:
    """LIBERO shapes: text, image, text, image, text; two images a sample, 7 real action dims."""
    tokens = config.mm_tokens_per_image
    types = torch.zeros(size, prefix, dtype=torch.int64)
    real = torch.ones(size, prefix, dtype=torch.int64)
    for i in range(size):
        head = 38 + i % 5
        types[i, head : head + tokens] = 1
        types[i, head + tokens + 5 : head + 2 * tokens + 5] = 1
        real[i, head + 2 * tokens + 10 :] = 0
    ids = torch.randint(3, config.text.vocab_size, (size, prefix)) * real
    mask = torch.zeros(size, config.chunk_size, config.action_dim)
    mask[..., :7] = 1
    return {
        "input_ids": ids.to(device),
        "token_type_ids": types.to(device),
        "attention_mask": real.to(device),
        "pixel_values": torch.rand(2 * size, 3, config.vision.image_size, config.vision.image_size, device=device) * 2
        - 1,
        "action": (torch.randn(size, config.chunk_size, config.action_dim) * mask).to(device),
        "action_mask": mask.to(device),
    }


def build(config: DM05Config, device: torch.device) -> DM05:
    with torch.device("meta"):
        model = DM05(config)
    model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).to_empty(device=device)
    generate_weights(model)
    freeze_untrained(model)
    return model


def timed(work, repeats: int = 10) -> float:
    work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def breakdown(work, steps: int = 3) -> dict[str, float]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(steps):
            work()
        torch.cuda.synchronize()
    kinds: dict[str, float] = {}
    rows = []
    for event in prof.key_averages():
        spent = event.self_device_time_total / 1000 / steps
        if spent <= 0:
            continue
        kind = next(k for k, pattern in KINDS if re.search(pattern, event.key, re.I))
        kinds[kind] = kinds.get(kind, 0) + spent
        rows.append((spent, event.count / steps, kind, event.key[:110]))
    for spent, count, kind, name in sorted(rows, reverse=True)[:45]:
        print(f"{spent:8.3f} ms {count:7.1f}x {kind:10s} {name}")
    return kinds


def compile_layers(model: DM05, what: str) -> None:
    if "expert" in what:
        for layer in model.expert.layers:
            layer.compile(dynamic=False, fullgraph=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, default=Path("tests/golden/dm05_config.json"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=576)
    parser.add_argument("--compile", default="expert")
    parser.add_argument("--modes", default="bf16,bf16_compensated")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--no-graph", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    raw = json.loads(args.config.read_text())
    raw["chunk_size"] = 10
    if args.layers:
        for part in (raw["vlm_config"]["text_config"], raw["action_config"]):
            part["num_hidden_layers"], part["layer_types"] = args.layers, part["layer_types"][: args.layers]
        raw["vlm_config"]["vision_config"]["num_hidden_layers"] = args.layers
    config = DM05Config.from_dict(raw)
    torch.manual_seed(0)
    model = build(config, device)
    restructure(model)
    remove_syncs(model)
    compile_layers(model, args.compile)
    batch = fake_batch(config, args.batch, args.prefix, device)
    positions = torch.arange(args.batch, device=device)
    trained = [p for p in model.parameters() if p.requires_grad]
    print("trained", sum(p.numel() for p in trained) / 1e9)

    def loss_of(batch, positions):
        noise, times = draw(0, positions, config.chunk_size, config.action_dim)
        return model.loss(batch, noise, times)

    began = time.monotonic()
    step = GraphedBackward(loss_of, trained)
    loss = step(batch, positions, first=True)
    torch.cuda.synchronize()
    print("loss", float(loss), "time to first step", round(time.monotonic() - began, 1), flush=True)
    ms = timed(lambda: step(batch, positions, first=True))
    print(
        f"B={args.batch} forward+backward graph: {ms:.2f} ms, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
        flush=True,
    )
    print(breakdown(lambda: step(batch, positions, first=True)), flush=True)

    from dm05_train.perf.fused_adamw import FusedAdamW

    for mode in args.modes.split(","):
        optimizer = FusedAdamW(
            [(n, p) for n, p in model.named_parameters() if p.requires_grad],
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=1e-10,
            mode=mode,
        )
        lr = torch.tensor(2.5e-5, device=device)

        def update():
            _, scale = optimizer.clip_scale(1.0)
            optimizer.step(lr, scale)

        def whole():
            step(batch, positions, first=True)
            update()

        clip = timed(lambda: optimizer.clip_scale(1.0))
        print(
            f"{mode}: clip {clip:.2f} ms, clip+step {timed(update):.2f} ms, whole step {timed(whole):.2f} ms, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
            flush=True,
        )
        del optimizer


if __name__ == "__main__":
    main()
