"""How ranks share the orthogonalising of weights that each holds whole (``Replicas``) or in part (``Shards``).

Both move parts of matrices ``[R, C]`` (BF16) to where the whole is needed and results back to where they are used.
Which rank works on which matrix (``owners``, from ``orthogonal.deal``) is the same list on all ranks and depends on
shapes alone, so that no rank can leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from dm05_train.errors import TrainError

Shape = tuple[int, int]


class Replicas:
    """Every rank holds every weight and its gradient whole: one process, or DDP.

    Args:
        group: the ranks that hold the same weights; None for one process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        self.groups = [group] if group is not None and self.size > 1 else []

    def rows(self, rows: int) -> slice:
        """The rows that this rank holds of a matrix."""
        return slice(0, rows)

    def sends(self, owner: int) -> bool:
        """Whether this rank's part of a matrix is needed when ``owner`` works on it."""
        return owner == self.rank

    def whole(self, part: Tensor, shape: Shape) -> Tensor:
        """The matrix that this part belongs to, on every rank."""
        return part

    def to_owners(self, parts: Sequence[Tensor], shapes: Sequence[Shape], owners: Sequence[int]) -> list[Tensor]:
        """The matrices dealt to this rank, in order; ``parts`` are those that ``sends`` asked for."""
        return list(parts)

    def from_owners(
        self, mine: Sequence[Tensor], shapes: Sequence[Shape], owners: Sequence[int], device: torch.device
    ) -> list[Tensor]:
        """This rank's part of every matrix, each computed by its owner: one gather, as long as the largest share."""
        if self.size == 1:
            return list(mine)
        shares: list[list[int]] = [[] for _ in range(self.size)]
        for (rows, columns), owner in zip(shapes, owners, strict=True):
            shares[owner].append(rows * columns)
        longest = max(sum(share) for share in shares)
        gathered = torch.empty(self.size * longest, dtype=torch.bfloat16, device=device)
        own = torch.zeros(longest, dtype=torch.bfloat16, device=device)
        if mine:
            torch.cat([matrix.flatten() for matrix in mine], out=own[: sum(shares[self.rank])])
        dist.all_gather_into_tensor(gathered, own, group=self.group)
        pieces = [
            iter(row[: sum(share)].split(share)) for row, share in zip(gathered.split(longest), shares, strict=True)
        ]
        return [next(pieces[owner]).view(shape) for shape, owner in zip(shapes, owners, strict=True)]


class Shards:
    """Every rank holds some rows of every weight: FSDP2, with or without replicas of the whole arrangement.

    Args:
        example: one of the weights; all must be sharded over the same mesh in the same way.
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

    def rows(self, rows: int) -> slice:
        """The rows that this rank holds of a matrix."""
        return self._rows(rows, self.rank)

    def _rows(self, rows: int, rank: int) -> slice:
        share = -(-rows // self.size)
        return slice(min(rank * share, rows), min((rank + 1) * share, rows))

    def _numel(self, shape: Shape, rank: int) -> int:
        held = self._rows(shape[0], rank)
        return (held.stop - held.start) * shape[1]

    def sends(self, owner: int) -> bool:
        """Whether this rank's part of a matrix is needed when ``owner`` works on it."""
        return True

    def whole(self, part: Tensor, shape: Shape) -> Tensor:
        """The matrix that this part belongs to, on every rank."""
        rows, columns = shape
        padded = part.new_zeros(-(-rows // self.size), columns)
        padded[: part.shape[0]] = part
        full = part.new_empty(self.size * padded.shape[0], columns)
        dist.all_gather_into_tensor(full, padded, group=self.group)
        return full[:rows]

    def _counts(self, shapes: Sequence[Shape], owners: Sequence[int]) -> tuple[list[int], list[int]]:
        """Elements of my parts that go to each owner; elements of my matrices that each rank holds."""
        out, back = [0] * self.size, [0] * self.size
        for shape, owner in zip(shapes, owners, strict=True):
            out[owner] += self._numel(shape, self.rank)
            if owner == self.rank:
                for rank in range(self.size):
                    back[rank] += self._numel(shape, rank)
        return out, back

    def _swap(self, pieces: Sequence[Tensor], give: list[int], take: list[int], device: torch.device) -> list[Tensor]:
        """One exchange of flattened pieces, in the order of the ranks they go to; what came from each rank."""
        sent = torch.empty(sum(give), dtype=torch.bfloat16, device=device)
        if pieces:
            torch.cat([piece.flatten() for piece in pieces], out=sent)
        received = torch.empty(sum(take), dtype=torch.bfloat16, device=device)
        dist.all_to_all_single(received, sent, take, give, group=self.group)
        return list(received.split(take))

    def to_owners(self, parts: Sequence[Tensor], shapes: Sequence[Shape], owners: Sequence[int]) -> list[Tensor]:
        """The matrices dealt to this rank, in order; ``parts`` are those that ``sends`` asked for."""
        give, take = self._counts(shapes, owners)
        ordered = [part for rank in range(self.size) for part, o in zip(parts, owners, strict=True) if o == rank]
        mine = [shape for shape, owner in zip(shapes, owners, strict=True) if owner == self.rank]
        received = self._swap(ordered, give, take, parts[0].device)
        by_rank = [iter(r.split([self._numel(s, rank) for s in mine])) for rank, r in enumerate(received)]
        return [torch.cat([next(source) for source in by_rank]).view(shape) for shape in mine]

    def from_owners(
        self, mine: Sequence[Tensor], shapes: Sequence[Shape], owners: Sequence[int], device: torch.device
    ) -> list[Tensor]:
        """This rank's part of every matrix, each computed by its owner: one exchange."""
        take, give = self._counts(shapes, owners)
        ordered = [matrix[self._rows(matrix.shape[0], rank)] for rank in range(self.size) for matrix in mine]
        received = self._swap(ordered, give, take, device)
        dealt: list[list[int]] = [[] for _ in range(self.size)]
        for shape, owner in zip(shapes, owners, strict=True):
            dealt[owner].append(self._numel(shape, self.rank))
        by_owner = [iter(r.split(counts)) for r, counts in zip(received, dealt, strict=True)]
        return [next(by_owner[owner]).view(-1, shape[1]) for shape, owner in zip(shapes, owners, strict=True)]
