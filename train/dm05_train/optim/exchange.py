"""How ranks share the orthogonalising of matrices that each holds whole (``Replicas``) or in part (``Shards``).

Both move parts of matrices (BF16) to where the whole is needed and results back to where they are used. Which rank
works on which matrix (``owners``, from ``orthogonal.deal``) is the same list on all ranks and depends on shapes alone,
so that no rank can leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from dm05_train.errors import TrainError

# Its name from torch 2.13 on, where the older one warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a matrix ``[rows, columns]`` lies: from row ``start`` of a weight of ``total`` rows."""

    start: int
    rows: int
    columns: int
    total: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.rows * self.columns


class Replicas:
    """Every rank holds every weight and its gradient whole: one process, or DDP.

    Args:
        group: the ranks that hold the same weights; None for one process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        self.groups = [group] if group is not None and self.size > 1 else []

    def held(self, place: Place) -> slice:
        """The rows of this rank's tensor that belong to a matrix."""
        return slice(place.start, place.start + place.rows)

    def sends(self, owner: int) -> bool:
        """Whether this rank's part of a matrix is needed when ``owner`` works on it."""
        return owner == self.rank

    def whole(self, part: Tensor, place: Place) -> Tensor:
        """The matrix that this part belongs to, on every rank."""
        return part

    def part(self, whole: Tensor, place: Place) -> Tensor:
        """What this rank holds of a whole matrix."""
        return whole

    def to_owners(self, parts: Sequence[Tensor], places: Sequence[Place], owners: Sequence[int]) -> list[Tensor]:
        """The matrices dealt to this rank, in order; ``parts`` are those that ``sends`` asked for."""
        return list(parts)

    def from_owners(
        self, mine: Sequence[Tensor], places: Sequence[Place], owners: Sequence[int], device: torch.device
    ) -> list[Tensor]:
        """This rank's part of every matrix, each computed by its owner: one gather, as long as the largest share."""
        if self.size == 1:
            return list(mine)
        shares = _by_owner(((place.numel, owner) for place, owner in zip(places, owners, strict=True)), self.size)
        longest = max(sum(share) for share in shares)
        gathered = torch.empty(self.size * longest, dtype=torch.bfloat16, device=device)
        own = torch.zeros(longest, dtype=torch.bfloat16, device=device)
        if mine:
            torch.cat([matrix.flatten() for matrix in mine], out=own[: sum(shares[self.rank])])
        _all_gather(gathered, own, group=self.group)
        rows = gathered.split(longest)
        pieces = [iter(row[: sum(share)].split(share)) for row, share in zip(rows, shares, strict=True)]
        return [next(pieces[o]).view(place.rows, place.columns) for place, o in zip(places, owners, strict=True)]


class Shards:
    """Every rank holds some rows of every weight: FSDP2, with or without replicas of the whole arrangement.

    Args:
        example: one of the weights; all must be sharded over the same mesh in the same way.

    Raises:
        TrainError: it is not sharded by rows over one mesh dimension.
    """

    def __init__(self, example: DTensor) -> None:
        mesh, dims = example.device_mesh, [i for i, p in enumerate(example.placements) if type(p) is Shard]
        others = [p for p in example.placements if not isinstance(p, Shard | Replicate)]
        if len(dims) != 1 or example.placements[dims[0]] != Shard(0) or others:
            raise TrainError(
                f"Muon cannot put together a weight placed as {example.placements}",
                fix="Shard by rows over one mesh dimension, or use --optimizer-config.optim adamw",
            )
        self.group = mesh.get_group(dims[0])
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]

    def held(self, place: Place) -> slice:
        """The rows of this rank's tensor that belong to a matrix."""
        return self._held(place, self.rank)

    def _held(self, place: Place, rank: int) -> slice:
        share = -(-place.total // self.size)
        first, end = rank * share, min((rank + 1) * share, place.total)
        low, high = max(place.start, first), min(place.start + place.rows, end)
        return slice(low - first, high - first) if low < high else slice(0, 0)

    def _numel(self, place: Place, rank: int) -> int:
        held = self._held(place, rank)
        return (held.stop - held.start) * place.columns

    def sends(self, owner: int) -> bool:
        """Whether this rank's part of a matrix is needed when ``owner`` works on it."""
        return True

    def whole(self, part: Tensor, place: Place) -> Tensor:
        """The matrix that this part belongs to, on every rank."""
        counts = [self._numel(place, rank) for rank in range(self.size)]
        padded = part.new_zeros(max(counts))
        padded[: part.numel()] = part.flatten()
        gathered = part.new_empty(self.size * len(padded))
        _all_gather(gathered, padded, group=self.group)
        parts = [piece[:count] for piece, count in zip(gathered.split(len(padded)), counts, strict=True)]
        return torch.cat(parts).view(place.rows, place.columns)

    def part(self, whole: Tensor, place: Place) -> Tensor:
        """What this rank holds of a whole matrix."""
        return self._part(whole, place, self.rank)

    def _part(self, whole: Tensor, place: Place, rank: int) -> Tensor:
        start = sum(self._numel(place, before) for before in range(rank)) // place.columns
        return whole[start : start + self._numel(place, rank) // place.columns]

    def _counts(self, places: Sequence[Place], owners: Sequence[int]) -> tuple[list[int], list[int]]:
        """Elements of my parts that go to each owner; elements of my matrices that each rank holds."""
        out, back = [0] * self.size, [0] * self.size
        for place, owner in zip(places, owners, strict=True):
            out[owner] += self._numel(place, self.rank)
            if owner == self.rank:
                for rank in range(self.size):
                    back[rank] += self._numel(place, rank)
        return out, back

    def _swap(self, pieces: Sequence[Tensor], give: list[int], take: list[int], device: torch.device) -> list[Tensor]:
        """One exchange of flattened pieces, in the order of the ranks they go to; what came from each rank."""
        sent = torch.empty(sum(give), dtype=torch.bfloat16, device=device)
        if pieces:
            torch.cat([piece.flatten() for piece in pieces], out=sent)
        received = torch.empty(sum(take), dtype=torch.bfloat16, device=device)
        dist.all_to_all_single(received, sent, take, give, group=self.group)
        return list(received.split(take))

    def to_owners(self, parts: Sequence[Tensor], places: Sequence[Place], owners: Sequence[int]) -> list[Tensor]:
        """The matrices dealt to this rank, in order; ``parts`` are those that ``sends`` asked for."""
        give, take = self._counts(places, owners)
        ordered = [part for group in _by_owner(zip(parts, owners, strict=True), self.size) for part in group]
        mine = [place for place, owner in zip(places, owners, strict=True) if owner == self.rank]
        received = self._swap(ordered, give, take, parts[0].device)
        by_rank = [iter(r.split([self._numel(p, rank) for p in mine])) for rank, r in enumerate(received)]
        return [torch.cat([next(source) for source in by_rank]).view(p.rows, p.columns) for p in mine]

    def from_owners(
        self, mine: Sequence[Tensor], places: Sequence[Place], owners: Sequence[int], device: torch.device
    ) -> list[Tensor]:
        """This rank's part of every matrix, each computed by its owner: one exchange."""
        take, give = self._counts(places, owners)
        ours = [place for place, owner in zip(places, owners, strict=True) if owner == self.rank]
        ordered = [
            self._part(matrix, place, rank)
            for rank in range(self.size)
            for matrix, place in zip(mine, ours, strict=True)
        ]
        received = self._swap(ordered, give, take, device)
        dealt = _by_owner(((self._numel(p, self.rank), o) for p, o in zip(places, owners, strict=True)), self.size)
        by_owner = [iter(r.split(counts)) for r, counts in zip(received, dealt, strict=True)]
        return [next(by_owner[o]).view(-1, place.columns) for place, o in zip(places, owners, strict=True)]


def _by_owner(items: Iterable[tuple[object, int]], size: int) -> list[list]:  # type: ignore[type-arg]
    """Items in order, in one list an owner."""
    groups: list[list[object]] = [[] for _ in range(size)]
    for item, owner in items:
        groups[owner].append(item)
    return groups
