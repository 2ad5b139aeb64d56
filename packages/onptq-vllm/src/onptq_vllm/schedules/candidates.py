"""Schedules worth timing beside humming's own: other tiles, another order of tiles, more or less in flight."""

from __future__ import annotations

from collections.abc import Iterator

from onptq_vllm.schedules.table import Schedule

FEW_ROWS = 64  # up to here a GEMM is bound by reading weights, beyond by arithmetic

# Rows and columns of a tile, and of a warp, by bits of an activation; humming's own tile is tried too.
WIDE_TILES = {
    8: (
        (160, 128, 160, 16),
        (240, 128, 240, 16),
        (256, 128, 128, 16),
        (96, 256, 96, 32),
        (96, 256, 96, 16),
        (128, 256, 128, 32),
        (128, 256, 128, 16),
    ),
    16: ((128, 256, 128, 32), (192, 256, 192, 32)),
}
# Whether tiles are cut to fill the GPU, blocks that share their activations, and rows of tiles that go together.
ORDERS = (
    (False, 1, 1),
    (False, 2, 1),
    (False, 1, 8),
    (False, 2, 8),
    (False, 2, 16),
    (True, 1, 1),
    (True, 2, 1),
    (True, 2, 16),
)

FILLED = 100  # tiles that fill a GPU without being cut
NARROW_TILES = ((128, 1), (128, 2), (128, 4), (256, 1), (256, 2))  # columns, and warps that share a sum
FLIGHTS = ((4, 1), (8, 1), (4, 2), (8, 2), (4, 3), (4, 4))  # stages, and blocks of a multiprocessor
# The same for tiles without a warp that only fetches.
PLAIN_FLIGHTS = ((4, 2), (8, 2), (4, 3), (3, 4), (4, 4), (6, 4), (3, 6), (4, 6))
# Columns and depth of a tile, and depth of a warp in bytes of activations, by the older instruction with narrower tiles.
OLDER_TILES = ((64, 128, 64), (64, 256, 128), (128, 128, 64), (128, 256, 128))
OLDER = {"mma_type": "mma", "use_warp_spec": False, "use_tma": False, "use_stream_k": True}
OLDER_ROWS, OLDER_WARP = 16, 32


def candidates(rows: int, own: Schedule, outputs: int, activation_bits: int) -> Iterator[Schedule]:
    """Schedules to try. Not all can be built: a tile may not fit into shared memory, or not divide the weight."""
    if rows > FEW_ROWS:
        yield from _wide(own, outputs, activation_bits)
        return
    yield from _narrow(own, outputs)
    if rows <= OLDER_ROWS:
        yield from _older(own, outputs, activation_bits)


def early(schedule: Schedule) -> Schedule:
    """The same schedule with programmatic dependent launch: set up while the previous kernel runs, waiting for its
    values."""
    return dict(schedule) | {"use_pdl": True}


def _wide(own: Schedule, outputs: int, activation_bits: int) -> Iterator[Schedule]:
    height, width, depth = own["block_shape"]
    tiles = ((height, width, *own["warp_shape"][:2]), *WIDE_TILES.get(activation_bits, ()))
    for rows, columns, *warp in dict.fromkeys(tiles):
        for cut, sharing, together in ORDERS:
            if outputs % (columns * sharing) == 0:
                shape = {"block_shape": [rows, columns, depth], "warp_shape": [*warp, depth]}
                order = {"use_stream_k": cut, "multi_cast_size_a": sharing, "raster_group_m": together}
                yield dict(own) | shape | order


def _narrow(own: Schedule, outputs: int) -> Iterator[Schedule]:
    rows, (_, warp, depth) = own["block_shape"][0], own["warp_shape"]
    for columns, summed in NARROW_TILES:
        if outputs % columns:
            continue
        shape = {"block_shape": [rows, columns, summed * depth], "warp_shape": [rows, warp, depth]}
        for stages, blocks in FLIGHTS:
            for cut in (True, False) if outputs // columns >= FILLED else (True,):
                flight = {"num_stages": stages, "num_ctas_per_sm": blocks, "use_stream_k": cut}
                yield dict(own) | shape | flight | {"use_warp_spec": True, "use_tma": True}
        for stages, blocks in PLAIN_FLIGHTS:
            flight = {"num_stages": stages, "num_ctas_per_sm": blocks, "use_stream_k": True}
            yield dict(own) | shape | flight | {"use_warp_spec": False, "use_tma": False}


def _older(own: Schedule, outputs: int, activation_bits: int) -> Iterator[Schedule]:
    for columns, depth, warp in OLDER_TILES:
        if outputs % columns == 0:
            depths = [8 * one // activation_bits for one in (depth, warp)]
            block, warps = [OLDER_ROWS, columns, depths[0]], [OLDER_ROWS, OLDER_WARP, depths[1]]
            for stages, blocks in PLAIN_FLIGHTS:
                flight = {"num_stages": stages, "num_ctas_per_sm": blocks}
                yield dict(own) | OLDER | flight | {"block_shape": block, "warp_shape": warps}
