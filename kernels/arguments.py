"""Arguments of kernels: values that belong together are passed together, as a ``NamedTuple``.

A kernel's parameter may be such a tuple. In SASS it is one parameter per field, in order; in the
source it is ``input.ptr`` and ``input.stride``. The launch makes it with the same class, so an argument
list is written only here::

    @triton.jit(do_not_specialize=["workspace"])
    def kernel(workspace, input, TILES: tl.constexpr):   # launch: workspace=Workspace(...), input=Rows(...)

Three facts to know:

- Triton ignores ``do_not_specialize`` inside a tuple: by itself it would compile a rank of 1 into the code,
  and compile once more for multiples of 16. The launches of ``interlace.runtime`` correct this for all
  fields of a listed tuple. So values that differ between ranks have their own tuple.
- Constants are *one* ``tl.constexpr`` argument, a tuple of plain numbers and strings. Pass such a tuple
  on as a whole: Triton 3.6 cannot pass a string from such a tuple to another function.
- In a bundle's manifest the fields are single arguments: ``rank``, and ``input_stride`` if a field needs
  the name of its tuple.
"""

from typing import Any, NamedTuple


class Peers(NamedTuple):
    """The ranks of a group: the table of their buffers' addresses, and this rank's number."""

    peers_ptr: Any
    rank: Any
    world_size: Any


class Workspace(NamedTuple):
    """The lease of a channel for one op. Functions that take ``Peers`` take this: it begins with them.

    ``slot_offset`` and ``data_offset`` are bytes from the beginning of every rank's buffer.
    """

    peers_ptr: Any
    rank: Any
    world_size: Any
    slot_offset: Any
    data_offset: Any


class Rows(NamedTuple):
    """A matrix with contiguous rows, ``stride`` elements apart."""

    ptr: Any
    stride: Any


class Weight(NamedTuple):
    """A matrix ``[K, N]`` with any strides."""

    ptr: Any
    stride_k: Any
    stride_n: Any


class Extents(NamedTuple):
    """Sizes of a fused op: rows of this rank's part and of all ranks, and tiles of all parts."""

    own_rows: Any
    all_rows: Any
    tiles: Any


class OwnRows(NamedTuple):
    """The rows of this rank among all ranks' rows, and the chunks of ``chunk_rows`` in which they
    travel."""

    rows: Any
    first_row: Any
    chunk_rows: Any
    chunks: Any


class Experts(NamedTuple):
    """A ``Weight`` for every expert: ``[E, K, N]``."""

    ptr: Any
    stride_e: Any
    stride_k: Any
    stride_n: Any


class TokenRows(NamedTuple):
    """The rows that travel with a token, as words: of ``x``, and of its scales if it has any.

    ``facts``: int32, for each of its k slots the expert, then the position among the rows that this rank
    has for that expert, then the bits of the weight.
    """

    x_ptr: Any
    x_words: Any
    scales_ptr: Any
    scale_words: Any
    facts_ptr: Any


class TokenRegions(NamedTuple):
    """The places of a dispatch's arrivals: byte offsets in the data region, multiples of 256."""

    counts_byte: Any
    x_byte: Any
    scales_byte: Any
    facts_byte: Any


class ExpertSizes(NamedTuple):
    """Sizes of a dispatch or combine.

    ``tokens``: tokens of this rank. ``most_tokens``: tokens of the rank with the most tokens. ``experts``:
    experts of one rank. ``senders``: programs that send to one rank. ``expert_rows``: distance, in rows of
    the result, between the first rows of two successive experts; 0 if the rows are contiguous.
    """

    tokens: Any
    most_tokens: Any
    experts: Any
    senders: Any
    expert_rows: Any


class CountLines(NamedTuple):
    """Counts for every rank, the segments that all ranks' counts give, and the byte where they arrive."""

    lines_ptr: Any
    segments_ptr: Any
    counts_byte: Any


class ArrivingRows(NamedTuple):
    """The input of a grouped matmul: ``segments`` lines of a table, experts, rows per chunk.

    ``region_rows``: rows from one source's region to the next, if each source has a region.
    """

    segments_ptr: Any
    segments: Any
    num_experts: Any
    chunk_rows: Any
    region_rows: Any


class ExpertRows(NamedTuple):
    """The result of a dispatch, by expert: words, and a weight per row as int32."""

    rows_ptr: Any
    row_scales_ptr: Any
    row_weights_ptr: Any


class Combined(NamedTuple):
    """Returned rows of tokens: the row of every slot (below 0: none), and its weight, fp32.

    ``output``: ``[own_tokens, N]``, contiguous.
    """

    inverse_ptr: Any
    slot_weights_ptr: Any
    output_ptr: Any
    own_tokens: Any


class SlotRows(NamedTuple):
    """Constants of kernels whose tokens have ``TOPK`` slots: how much a program moves at a time.

    ``EXPERTS``: a power of two, as many as a rank has, or more. ``SUM_ROWS``: tokens that are summed at a
    time. ``SCALED``, ``WEIGHTED``: whether there are scales and weights.
    """

    TOPK: int
    EXPERTS: int
    BLOCK_ROWS: int
    BLOCK_COLUMNS: int
    SUM_ROWS: int
    SCALED: bool
    WEIGHTED: bool


class Table(NamedTuple):
    """Lines of int64, ``count`` of them; the kernel that reads the table describes a line."""

    ptr: Any
    count: Any


class TablePart(NamedTuple):
    """A part of a table: ``count`` lines, of which ``first`` is the number of the first one."""

    ptr: Any
    first: Any
    count: Any


class Lot(NamedTuple):
    """The flagged words of one block, and their epoch.

    ``offset`` is the byte of a rank's buffer at which the flagged words of all blocks begin.
    """

    offset: Any
    epoch: Any
    block: Any


class Turn(NamedTuple):
    """Tiles of a program: ``first``, ``first + programs`` ...; the tiles of the part begin at ``start``."""

    first: Any
    start: Any
    programs: Any


class Span(NamedTuple):
    """Bytes of one rank's buffer, and their place in another's: byte offsets in both."""

    from_byte: Any
    to_byte: Any
    nbytes: Any


class Epilogue(NamedTuple):
    """Operands of the operations on a finished tile (``epilogue.py``); unused if an option is off."""

    bias_ptr: Any
    row_scale_ptr: Any
    column_scale_ptr: Any


class NormOperands(NamedTuple):
    """Operands of a norm of whole rows (``norms.py``), and the places of its results; unused if off."""

    residual_ptr: Any
    norm_weight_ptr: Any
    norm_bias_ptr: Any
    normed_ptr: Any
    scale_ptr: Any


class Gathered(NamedTuple):
    """Rows that every rank gets: all of them, and the places where other ranks' rows arrive first.

    ``slices``: slots of each source, from byte ``slots_byte`` of a rank's slots on. The other bytes are
    offsets of regions in a rank's data, multiples of 256.
    """

    all_normed_ptr: Any
    all_sums_ptr: Any
    all_scales_ptr: Any
    slots_byte: Any
    slices: Any
    normed_byte: Any
    sum_byte: Any
    scale_byte: Any


class Tail(NamedTuple):
    """Constants of the operations on whole rows of a sum (``norms.py``), ``ROWS`` x ``COLUMNS`` at a time.

    ``KIND``: "rms" or "layer". ``GATHER``: "" for own rows, "normed" if all ranks get the normed rows,
    "both" if they also get the rows of the sum. ``VALUES``, ``SCALE``, ``BLOCK``: for packed normed rows,
    see ``block_scales.py``; then ``COLUMNS`` is a multiple of 128. ``NATIVE``: see there.
    """

    KIND: str
    EPS: float
    RESIDUAL: bool
    NORM_WEIGHT: bool
    NORM_BIAS: bool
    QUANTIZE: bool
    GATHER: str
    ROWS: int
    COLUMNS: int
    VALUES: str = ""
    SCALE: str = ""
    BLOCK: int = 0
    NATIVE: str = ""


class Copies(NamedTuple):
    """Constants of the programs that send chunks: their number, and how much each moves at a time.

    ``MULTICAST``: "" sends to each rank separately, "multimem" once for all ranks, through the switch.
    "peers" does the same as "multimem" without a switch, for tests.
    """

    COPIERS: int
    COPY_ROWS: int
    COPY_COLUMNS: int
    MULTICAST: str = ""


class Tiles(NamedTuple):
    """Constants of a matmul: how tiles are computed (``matmul.py``), and the operations on finished tiles.

    ``ALIGNED``: rows of the input, both in place and gathered, begin at multiples of 16 bytes. ``FLATTEN``,
    ``WARP_SPECIALIZE``: options of the compiler for the tile loop. ``COMPILED``: not interpreted, so there
    are instructions that order TMA accesses. From ``SCALES`` to ``OUT_DESCRIPTOR`` see ``epilogue.py``.
    The last five describe block-scaled operands, see ``block_scales.py``.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int = 0
    GROUP_M: int = 1
    DESCRIPTORS: str = ""
    INPUT_PRECISION: str = ""
    FAST_ACCUM: bool = False
    ALIGNED: bool = False
    FLATTEN: bool = False
    WARP_SPECIALIZE: bool = False
    COMPILED: bool = False
    SCALES: str = ""
    BIAS: str = ""
    ACTIVATION: str = ""
    SUBTILE: int = 1
    OUT_DESCRIPTOR: bool = False
    VALUES: str = ""
    SCALE: str = ""
    BLOCK: int = 0
    NATIVE: str = ""
    WEIGHT_VALUES: str = ""


class Node(NamedTuple):
    """The ranks of this node (this rank is number ``own_member``), and the nodes of the group.

    ``sums``: a line per node: the rank that puts that node's sum here, and the number of this duty there.
    This node is number ``own_node``.
    """

    members_ptr: Any
    num_members: Any
    own_member: Any
    sums_ptr: Any
    num_nodes: Any
    own_node: Any


class Regions(NamedTuple):
    """The places of sums over nodes in a rank's buffer.

    Contributions are ``region_stride`` elements apart. The rank's partial sums are at ``partial_offset``.
    Partial sums that arrive from other nodes are at ``landing_offset``. Both offsets are in bytes, and are
    multiples of 256.
    """

    region_stride: Any
    partial_offset: Any
    landing_offset: Any


class NodeSlots(NamedTuple):
    """Slots of sums over nodes: ``slots_each`` for a contribution of one rank, and for a sum of one node.

    Puts set slots from ``landing_slot`` on; this rank repeats them from ``landed_slot`` on for readers.
    """

    slots_each: Any
    landing_slot: Any
    landed_slot: Any


class Heads(NamedTuple):
    """Heads of an attention: ``heads`` of queries; ``per_key`` of them share a head of the keys.

    Query head h sees key head ``(h + first_head) // per_key``: a rank may have a part of the heads.
    """

    batches: Any
    heads: Any
    key_heads: Any
    per_key: Any
    first_head: Any


class Queries(NamedTuple):
    """``[rows, batches, heads, size]``, contiguous along the last: queries, results, or a cache of keys."""

    ptr: Any
    stride: Any
    stride_b: Any
    stride_h: Any


class Pages(NamedTuple):
    """The places of a sequence's keys: int32 or int64 ``[batches, stride]`` pages of ``size`` tokens.

    ``size`` 0: there are no pages, and the keys of a batch are contiguous.
    """

    ptr: Any
    stride: Any
    size: Any


class Spans(NamedTuple):
    """int64 ``[batches, rows, 2]``: the range (begin, end) of positions of the keys that a query row sees.
    ``span_stride``: elements between batches, 0 if all batches are alike."""

    ptr: Any
    span_stride: Any


class Partials(NamedTuple):
    """Results over each part of the keys, fp32: ``[parts, batches, heads, rows, size]``, and the
    logarithms, to base 2, of the sums of exponentials, ``[parts, batches, heads, rows]``."""

    ptr: Any
    lse_ptr: Any
    rows: Any


class KeyPart(NamedTuple):
    """Keys of one part: ``rows`` from ``position`` of the sequence on, then ``more_rows``."""

    number: Any
    rows: Any
    position: Any
    more_rows: Any
    more_position: Any


class RowSums(NamedTuple):
    """For every query row, fp32 ``[batches, heads, rows]``: the logarithm, to base 2, of its sum of
    exponentials, infinite if it sees no key; and the number that its gradients subtract."""

    lse_ptr: Any
    delta_ptr: Any
    rows: Any


class AttentionTiles(NamedTuple):
    """Constants of an attention: query rows and keys of a tile, and two head sizes.

    ``HEAD_DIM`` is the head size of queries and keys, ``VALUE_DIM`` the head size of values and results.
    Both are rounded up to a power of two. ``DESCRIPTORS``: keys and values are loaded by descriptor (TMA).
    ``COMPILED``: see ``Tiles``.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_V: int
    HEAD_DIM: int
    VALUE_DIM: int
    INPUT_PRECISION: str
    DESCRIPTORS: bool
    COMPILED: bool
