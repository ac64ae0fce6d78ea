"""Muon: what it computes (one process), and that any number of ranks computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from dm05_train.config import OptimizerConfig
from dm05_train.errors import TrainError
from dm05_train.optim.adamw import AdamW
from dm05_train.optim.clip import clip_scale
from dm05_train.optim.muon import Muon, muon_parameters
from dm05_train.optim.muon_adamw import MuonAdamW, build_muon_adamw
from dm05_train.optim.orthogonal import EPS, cost, deal, in_batches, neighbours, orthogonalise
from dm05_train.optim.precision import Mode, read_master
from muon_ranks import COUNTS, KINDS, SIZES, Run, matrices, run_rank
from torch import Tensor, nn

LR = torch.tensor(0.02)
ONE = torch.tensor(1.0)


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))
    weight.grad = torch.randn(*shape, generator=generator).to(dtype)
    return weight


def adamw(named: list[tuple[str, nn.Parameter]], mode: Mode = "fp32") -> AdamW:
    return AdamW(named, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, mode=mode)


def newton_schulz_64(matrix: Tensor, steps: int = 5) -> Tensor:
    """The iteration written down plainly, in float64."""
    x = matrix.double() / matrix.double().norm().clamp(min=1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


@pytest.mark.parametrize(("mode", "off"), [("fp32", 0.005), ("fp32_master", 0.005), ("bf16_compensated", 0.01)])
@pytest.mark.parametrize("shape", [(32, 96), (96, 32), (48, 48)])
def test_two_hundred_steps_agree_with_float64(shape: tuple[int, int], mode: Mode, off: float) -> None:
    """Weights after a fine-tuning's steps (a rate far below BF16's last bit, noisy gradients, a clip) against the whole
    optimizer written down in float64; the difference is a share of how far they moved."""
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter((0.02 * torch.randn(shape, generator=generator)).to(dtype))
    optimizer = Muon([("w", weight)], mode=mode, weight_decay=0.01)
    rate, clip, scale = 2.5e-5, 0.7, 0.2 * max(shape) ** 0.5
    start, drift = weight.detach().double(), torch.randn(shape, generator=generator)
    exact, mean = start.clone(), torch.zeros_like(start)
    for _ in range(200):
        weight.grad = (1e-3 * (0.2 * drift + torch.randn(shape, generator=generator))).to(dtype)
        optimizer.step(torch.tensor(rate), torch.tensor(clip))
        gradient = weight.grad.double() * clip
        mean = mean.lerp(gradient, 0.05)
        exact = exact * (1 - rate * 0.01) - rate * scale * newton_schulz_64(gradient.lerp(mean, 0.95))
    held = read_master(weight.detach(), optimizer.state[weight]).double()
    assert (held - exact).norm() / (exact - start).norm() < off


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-8, 1e-4, 1.0, 1e15])
def test_updates_of_any_size_of_gradient(size: float) -> None:
    """The update does not depend on the size of the gradient down to a norm of EPS; below it fades, finite always."""
    direction = torch.randn(32, 48, generator=torch.Generator().manual_seed(3))
    update = orthogonalise((size * direction).bfloat16()[None], 5)[0].float()
    reference = orthogonalise(direction.bfloat16()[None], 5)[0].float()
    assert torch.isfinite(update).all()
    if size * direction.norm() > EPS:
        assert (update - reference).norm() / reference.norm() < 0.05
    else:
        assert update.norm() < reference.norm()


@pytest.mark.parametrize("shape", [(64, 64), (48, 160), (160, 48), (1, 7), (7, 1), (1, 1)])
def test_orthogonalise_agrees_with_float64(shape: tuple[int, int]) -> None:
    stack = torch.randn(5, *shape, generator=torch.Generator().manual_seed(1))
    result = orthogonalise(stack.bfloat16(), 5).double()
    for matrix, ours in zip(stack.bfloat16(), result, strict=True):
        reference = newton_schulz_64(matrix)
        assert (ours - reference).norm() / reference.norm() < 0.02


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (64, 64)])
def test_updates_are_near_orthogonal(shape: tuple[int, int]) -> None:
    """All singular values in the band that the polynomial leads to, from a matrix with a condition of 50."""
    u, _, vt = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(2)), full_matrices=False)
    spread = torch.logspace(0, -1.7, min(shape))
    update = orthogonalise((u * spread @ vt).bfloat16()[None], 5)[0].float()
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.65 and values.max() < 1.25
    assert torch.linalg.svdvals(u.T @ update @ vt.T - torch.diag((u.T @ update @ vt.T).diag())).max() < 0.1


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_agrees_with_torch(batched: bool, nesterov: bool) -> None:
    """The same weights as torch.optim.Muon: to BF16 rounding of the update when batched, else to float32 rounding."""
    ours, theirs = (
        [parameter(24, 40, seed=i) for i in range(3)] + [parameter(40, 24, seed=i) for i in range(2)] for _ in range(2)
    )
    start = [p.detach().clone() for p in ours]
    optimizer = Muon(
        [(f"w{i}", p) for i, p in enumerate(ours)], weight_decay=0.1, nesterov=nesterov, mode="fp32", batched=batched
    )
    reference = torch.optim.Muon(
        theirs, lr=LR.item(), weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        for seed, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(100 * step + seed))
            other.grad = mine.grad.clone()
        optimizer.step(LR, ONE)
        reference.step()
    for mine, other, before in zip(ours, theirs, start, strict=True):
        assert (mine - other).norm() / (other - before).norm() < (0.02 if batched else 1e-3)
        torch.testing.assert_close(
            optimizer.state[mine]["momentum_buffer"], reference.state[other]["momentum_buffer"], rtol=1e-5, atol=1e-6
        )


def test_update_size_matches_adamw() -> None:
    """Root mean square of an update is the coefficient times the rate, whatever the shape, within the band."""
    for shape in [(64, 64), (32, 128), (128, 32)]:
        weight = parameter(*shape)
        before = weight.detach().clone()
        Muon([("w", weight)], mode="fp32").step(LR, ONE)
        rms = (weight - before).square().mean().sqrt() / LR
        assert 0.2 * 0.65 < rms < 0.2 * 1.25


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("splits", [(16, 8, 8), (1, 31), (32,)])
def test_packed_weights_move_as_separate_matrices(batched: bool, splits: tuple[int, ...]) -> None:
    packed = parameter(32, 24)
    parts = [nn.Parameter(part.clone()) for part in packed.detach().split(splits)]
    for part, gradient in zip(parts, packed.grad.split(splits), strict=True):
        part.grad = gradient.clone()
    together = Muon([("qkv", packed)], mode="fp32", splits={"qkv": splits}, batched=batched)
    apart = Muon([(f"w{i}", part) for i, part in enumerate(parts)], mode="fp32", batched=batched)
    for optimizer in (together, apart):
        optimizer.step(LR, ONE)
        optimizer.step(LR, ONE)
    torch.testing.assert_close(packed.detach(), torch.cat([part.detach() for part in parts]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("mode", ["fp32", "bf16_compensated"])
def test_bad_scale_skips_the_step(mode: Mode, batched: bool, scale: float) -> None:
    weight = parameter(16, 24, dtype=torch.bfloat16 if mode == "bf16_compensated" else torch.float32)
    optimizer = Muon([("w", weight)], mode=mode, batched=batched)
    optimizer.step(LR, ONE)
    before = weight.detach().clone(), {key: value.clone() for key, value in optimizer.state[weight].items()}
    weight.grad[0, 0] = float("nan")
    weight.grad[1, 1] = float("inf")
    optimizer.step(LR, torch.tensor(scale))
    assert torch.equal(weight.detach(), before[0])
    assert all(torch.equal(value, before[1][key]) for key, value in optimizer.state[weight].items())
    assert optimizer.steps == 1


def test_clip_scales_what_enters_the_momentum() -> None:
    weight = parameter(16, 24)
    optimizer = Muon([("w", weight)], mode="fp32")
    optimizer.step(LR, torch.tensor(0.25))
    torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], weight.grad * 0.25 * 0.05)


@pytest.mark.parametrize("batched", [True, False])
def test_zero_gradient_and_no_gradient(batched: bool) -> None:
    zero, without, normal = (parameter(16, 24, seed=i) for i in range(3))
    zero.grad.zero_()
    without.grad = None
    before = [p.detach().clone() for p in (zero, without, normal)]
    Muon([("zero", zero), ("without", without), ("normal", normal)], mode="fp32", batched=batched).step(LR, ONE)
    assert torch.equal(zero.detach(), before[0]) and torch.equal(without.detach(), before[1])
    assert not torch.equal(normal.detach(), before[2])
    nothing = parameter(4, 4)
    nothing.grad = None
    Muon([("nothing", nothing)], mode="fp32", batched=batched).step(LR, ONE)


@pytest.mark.parametrize("mode", ["bf16_compensated", "fp32_master"])
def test_bf16_weights_keep_what_rounds_away(mode: Mode) -> None:
    """A hundred updates, each too small for BF16, add up as they do in float32."""
    small = torch.tensor(1e-5)
    exact, rounded = parameter(16, 24), parameter(16, 24, dtype=torch.bfloat16)
    exact.data.copy_(rounded.detach())
    exact.grad.copy_(rounded.grad)
    start = exact.detach().clone()
    a, b = Muon([("w", exact)], mode="fp32"), Muon([("w", rounded)], mode=mode)
    for _ in range(100):
        a.step(small, ONE)
        b.step(small, ONE)
    moved = read_master(rounded.detach(), b.state[rounded]) - start
    assert (moved - (exact - start)).norm() / (exact - start).norm() < 0.02


def test_step_reads_nothing_from_the_device() -> None:
    """A step on the meta device, where any read of a value is an error."""
    weight = nn.Parameter(torch.empty(16, 24, device="meta"))
    weight.grad = torch.empty_like(weight)
    for batched in (True, False):
        optimizer = Muon([("w", weight)], mode="fp32", batched=batched)
        optimizer.step(torch.empty((), device="meta"), torch.empty((), device="meta"))


def test_selects_the_matrices_of_the_expert_layers() -> None:
    names = [
        "model.action_expert.layers.0.self_attn.q_proj.weight",
        "model.action_expert.layers.33.mlp.down_proj.weight",
        "module.action_expert.layers.3.self_attn.qkv_proj.weight",
    ]
    others = [
        "model.action_expert.input_time_modulators.0.weight",
        "model.action_expert.final_time_modulator.weight",
        "model.vlm.model.language_model.layers.0.mlp.up_proj.weight",
        "model.action_in_proj.weight",
    ]
    vectors = ["model.action_expert.layers.0.self_attn.q_norm.weight"]
    given = [(n, parameter(4, 4)) for n in names + others] + [(n, parameter(4)) for n in vectors]
    muon, rest = muon_parameters(given)
    assert [name for name, _ in muon] == names
    assert [name for name, _ in rest] == others + vectors


def test_refuses_what_is_no_matrix() -> None:
    with pytest.raises(TrainError, match="no matrices"):
        Muon([], mode="fp32")
    with pytest.raises(TrainError, match=r"bias has shape \[4\]"):
        Muon([("bias", parameter(4))], mode="fp32")
    with pytest.raises(TrainError, match=r"qkv has 4 rows, its matrices \[2, 3\]"):
        Muon([("qkv", parameter(4, 4))], mode="fp32", splits={"qkv": (2, 3)})


def test_same_state_keys_as_adamw_beside_the_moments() -> None:
    a, b = parameter(4, 8, dtype=torch.bfloat16), parameter(4, 8, dtype=torch.bfloat16)
    other = adamw([("a", a)], mode="bf16_compensated")
    muon = Muon([("b", b)], mode="bf16_compensated")
    assert set(muon.state[b]) - {"momentum_buffer"} == set(other.state[a]) - {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_deal_is_fair(ranks: int) -> None:
    costs = [cost(r, c, 5) for r, c in [(1024, 4096)] * 3 + [(2048, 1024)] * 2 + [(1024, 1024)] * 2] * 34
    owners = deal(costs, ranks)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(ranks)]
    assert max(loads) < 1.01 * sum(costs) / ranks
    assert deal(costs, ranks) == owners
    assert set(deal([1.0], ranks)) == {0}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What each rank holds after each run, all runs made by one set of four gloo processes."""
    folder = tmp_path_factory.mktemp("muon")
    mp.spawn(run_rank, args=(max(SIZES), folder), nprocs=max(SIZES))
    parts = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(max(SIZES))]
    return {key: value for part in parts for key, value in part.items()}


def distance(a: Sequence[Tensor], b: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """Difference of two outcomes, as a share of how far the weights moved from the start."""
    apart, moved = (torch.cat([(x - y).flatten() for x, y in zip(*two, strict=True)]) for two in ((a, b), (b, start)))
    assert torch.isfinite(apart).all()
    return (apart.norm() / moved.norm().clamp(min=1e-9)).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
def test_ranks_agree(outcomes: dict[Any, Any], count: int, kind: str) -> None:
    """Batched or not, on any number of ranks, in replicas or shards: the weights of one process, to rounding; and all
    ranks of a run hold the same bits."""
    start = [weight.float() for weight in matrices(count, kind)]
    one = outcomes[Run(size=1, count=count, kind="plain" if kind == "sharded" else kind, batched=False), 0]
    for size in SIZES:
        for batched in (True, False):
            run = Run(size=size, count=count, kind=kind, batched=batched)
            assert distance(outcomes[run, 0], one, start) < 0.02
            for rank in range(1, size):
                assert all(map(torch.equal, outcomes[run, rank], outcomes[run, 0]))


@pytest.mark.parametrize("kind", ["frozen", "missing", "zero"])
def test_what_has_no_gradient_stays(outcomes: dict[Any, Any], kind: str) -> None:
    start = matrices(9, kind)
    decayed = (1 - 0.02 * 0.1) ** 2
    for (run, _), weights in ((k, v) for k, v in outcomes.items() if isinstance(k[0], Run)):
        if run.count == 9 and run.kind == kind and kind != "zero":
            assert all(map(torch.equal, weights[::3], start[::3]))
            assert not any(map(torch.equal, weights[1::3], start[1::3]))
        elif run.count == 9 and run.kind == kind:
            torch.testing.assert_close(weights[1::3], [weight * decayed for weight in start[1::3]])


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_through_the_real_wrappers(outcomes: dict[Any, Any], parallel: str, batched: bool) -> None:
    """DDP and FSDP2 on four ranks with accumulated gradients give the weights of one process on the whole batch."""
    start = [torch.zeros_like(weight) for weight in outcomes["none"]]
    for rank in range(max(SIZES)):
        assert distance(outcomes[parallel, batched, rank], outcomes["none"], start) < 0.005


def test_ranks_that_differ_are_told(outcomes: dict[Any, Any]) -> None:
    assert outcomes["disagree", 0].startswith("Muon has other matrices on rank 1 than here: w1 [4, 4]")
    assert "rank 0" in outcomes["disagree", 1]


def test_muon_and_adamw_as_one() -> None:
    """Each moves its own parameters as if alone; names, state and the count of updates are those of both."""
    matrix, vector = parameter(8, 12), parameter(12, seed=1)
    apart = Muon([("m", parameter(8, 12))], mode="fp32"), adamw([("v", parameter(12, seed=1))])
    both = MuonAdamW(Muon([("m", matrix)], mode="fp32"), adamw([("v", vector)]))
    for scale in (1.0, 0.0, 0.5):
        both.step(LR, torch.tensor(scale))
        for optimizer in apart:
            optimizer.step(LR, torch.tensor(scale))
    for ours, alone in zip((matrix, vector), (p for o in apart for p in o.parameters), strict=True):
        assert torch.equal(ours.detach(), alone.detach())
    norm, scale = both.clip_scale(1.0)
    wanted, expected = clip_scale([matrix, vector], 1.0)
    torch.testing.assert_close((norm, scale), (wanted, expected))
    vector.grad[0] = float("inf")
    assert both.clip_scale(1.0)[1] == 0
    assert both.names == {matrix: "m", vector: "v"} and both.steps == 2
    assert {key for state in both.state.values() for key in state} == {"momentum_buffer", "exp_avg", "exp_avg_sq"}


def test_adamw_can_take_over_late() -> None:
    """After a change of optimizer AdamW's moments start from zero while the count of updates goes on: its steps stay
    near the rate all the same."""
    weight = parameter(64)
    optimizer = adamw([("w", weight)])
    optimizer.steps.fill_(1000)
    for _ in range(50):
        before = weight.detach().clone()
        optimizer.step(LR, ONE)
        assert ((weight - before).abs() / LR).max() < 1.2


def test_built_from_the_settings_of_a_run() -> None:
    named = [
        ("model.action_expert.layers.0.self_attn.qkv_proj.weight", parameter(16, 8)),
        ("model.action_expert.layers.0.mlp.down_proj.weight", parameter(8, 12)),
        ("model.action_out_proj.weight", parameter(4, 8)),
    ]
    config = OptimizerConfig(optim="muon_adamw", muon_lr_scale=2.0, muon_coefficient=0.5, muon_ns_steps=3)
    both = build_muon_adamw(
        named, config, "fp32", splits={named[0][0]: (8, 4, 4), "other": (1,)}, batched=True, adamw=adamw
    )
    assert [matrix.place.rows for matrix in both.muon.matrices] == [8, 4, 4, 8]
    assert (both.muon.lr_scale, both.muon.ns_steps, both.muon.weight_decay) == (2.0, 3, config.weight_decay)
    assert both.muon.matrices[0].scale == pytest.approx(0.5 * 8**0.5)
    assert list(both.rest.names.values()) == ["model.action_out_proj.weight"]
    both.step(LR, ONE)


def test_same_shapes_lie_next_to_each_other() -> None:
    """A stack of matrices made for it is the memory they lie in."""
    shapes = [(2, 3), (4, 2), (2, 3), (4, 2), (1, 1), (2, 3)]
    made = neighbours(shapes, torch.device("cpu"))
    for matrix in made:
        matrix.fill_(1.0)
    same = [matrix for matrix, shape in zip(made, shapes, strict=True) if shape == (2, 3)]
    results = in_batches(partial(orthogonalise, steps=1), made)
    assert [tuple(r.shape) for r in results] == shapes
    assert all((matrix < 1.0).all() for matrix in same)  # normalised where they lie
