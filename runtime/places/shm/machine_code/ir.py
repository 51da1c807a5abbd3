"""The LLVM IR of what runs steps (``steps.py``): copies, sums, and waiting for words of shared memory.

Text, because that is what LLVM takes. One function::

    i64 run(i64 *words, i64 first)      the number of the step that stopped it, or -1 at the end

``words`` begins with what does not change, goes on with the registers, and then has STEP words for each
step: its kind, a list and its length, and three operands, each a number and the register to add to it.
"""

from __future__ import annotations

from dataclasses import dataclass

YIELD, MOVE, COMPARE_BYTES, CLOCK, SPINS, YIELDS, PATIENCE = range(7)  # what does not change
REGISTERS = 8  # the word of register 0, which is 0 always
FIRST = 16  # the word at which the steps begin
STEP = 9  # words of each: kind, list, length, x, register, y, register, z, register
END, COPY, RELEASE, RING, WAIT, COMPARE, STREAM, PAST, SUM = range(9)


@dataclass(frozen=True)
class Element:
    """How elements are loaded, added and stored: ``bits`` in memory, ``type`` in registers."""

    name: str
    bits: int
    type: str
    add: str
    wide: int  # bits in registers

    @property
    def lanes(self) -> int:
        return 256 // self.wide


ELEMENTS = (
    Element("float32", 32, "float", "fadd", 32),
    Element("float64", 64, "double", "fadd", 64),
    Element("float16", 16, "half", "fadd", 32),
    Element("bfloat16", 16, "bfloat", "fadd", 32),
    Element("int8", 8, "i8", "add", 8),
    Element("int16", 16, "i16", "add", 16),
    Element("int32", 32, "i32", "add", 32),
    Element("int64", 64, "i64", "add", 64),
)
"""Sums from left to right: integers wrap around, 16-bit floats are summed in fp32 and rounded once."""

_UNROLLED = 4

_RUN = """
declare void @llvm.x86.sse2.pause()
declare void @llvm.x86.sse.sfence()
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare i64 @llvm.umin.i64(i64, i64)

define i64 @run(ptr %words, i64 %first) nounwind {{
entry:
  %env.yield = load ptr, ptr %words
  %at.move = getelementptr i64, ptr %words, i64 {MOVE}
  %env.move = load ptr, ptr %at.move
  %at.compare = getelementptr i64, ptr %words, i64 {COMPARE_BYTES}
  %env.compare = load ptr, ptr %at.compare
  %at.spins = getelementptr i64, ptr %words, i64 {SPINS}
  %env.spins = load i64, ptr %at.spins
  %at.yields = getelementptr i64, ptr %words, i64 {YIELDS}
  %env.yields = load i64, ptr %at.yields
  %at.clock = getelementptr i64, ptr %words, i64 {CLOCK}
  %env.clock = load ptr, ptr %at.clock
  %at.patience = getelementptr i64, ptr %words, i64 {PATIENCE}
  %env.patience = load i64, ptr %at.patience
  %time = alloca [2 x i64]
  %time.rest = getelementptr i64, ptr %time, i64 1
  %registers = getelementptr i64, ptr %words, i64 {REGISTERS}
  br label %next
next:
  %i = phi i64 [%first, %entry], [%following, %advance]
  %number = mul i64 %i, {STEP}
  %word = add i64 %number, {FIRST}
  %step = getelementptr i64, ptr %words, i64 %word
  %kind = load i64, ptr %step
  %at.list = getelementptr i64, ptr %step, i64 1
  %list = load ptr, ptr %at.list
  %at.length = getelementptr i64, ptr %step, i64 2
  %length = load i64, ptr %at.length
{operands}
  %following = add i64 %i, 1
  switch i64 %kind, label %stop [
    i64 {END}, label %end
    i64 {COPY}, label %copy
    i64 {RELEASE}, label %release
    i64 {RING}, label %ring
    i64 {WAIT}, label %wait
    i64 {COMPARE}, label %compare
    i64 {STREAM}, label %stream
    i64 {PAST}, label %past
{sums}
  ]
advance:
  br label %next
end:
  ret i64 -1
stop:
  ret i64 %i
copy:
  %copy.to = inttoptr i64 %x to ptr
  %copy.from = inttoptr i64 %y to ptr
  call ptr %env.move(ptr %copy.to, ptr %copy.from, i64 %z)
  br label %advance
release:
  %release.to = inttoptr i64 %x to ptr
  store atomic i64 %y, ptr %release.to release, align 8
  br label %advance
ring:
  %ring.k = phi i64 [0, %next], [%ring.k1, %ring.look]
  %ring.more = icmp ult i64 %ring.k, %length
  br i1 %ring.more, label %ring.look, label %advance
ring.look:
  %ring.at = getelementptr i64, ptr %list, i64 %ring.k
  %ring.address = load ptr, ptr %ring.at
  %ring.asleep = load atomic i64, ptr %ring.address monotonic, align 8
  %ring.k1 = add i64 %ring.k, 1
  %ring.is = icmp ne i64 %ring.asleep, 0
  br i1 %ring.is, label %stop, label %ring
wait:
  %wait.k = phi i64 [0, %next], [%wait.k1, %wait.seen]
  %wait.yields = phi i64 [%env.yields, %next], [%wait.left, %wait.seen]
  %wait.began = phi i64 [0, %next], [%wait.since, %wait.seen]
  %wait.more = icmp ult i64 %wait.k, %length
  br i1 %wait.more, label %wait.begin, label %advance
wait.begin:
  %wait.at = getelementptr i64, ptr %list, i64 %wait.k
  %wait.address = load ptr, ptr %wait.at
  br label %wait.poll
wait.poll:
  %wait.left = phi i64 [%wait.yields, %wait.begin], [%wait.left, %wait.pause], [%wait.fewer, %wait.yield]
  %wait.spins = phi i64 [%env.spins, %wait.begin], [%wait.spins1, %wait.pause], [0, %wait.yield]
  %wait.since = phi i64 [%wait.began, %wait.begin], [%wait.since, %wait.pause], [%wait.from, %wait.yield]
  %wait.value = load atomic i64, ptr %wait.address acquire, align 8
  %wait.there = icmp sge i64 %wait.value, %y
  br i1 %wait.there, label %wait.seen, label %wait.not
wait.not:
  %wait.spin = icmp sgt i64 %wait.spins, 0
  br i1 %wait.spin, label %wait.pause, label %wait.patience
wait.pause:
  call void @llvm.x86.sse2.pause()
  %wait.spins1 = sub i64 %wait.spins, 1
  br label %wait.poll
wait.patience:
  %wait.may = icmp sgt i64 %wait.left, 0
  br i1 %wait.may, label %wait.look, label %stop
wait.look:
  call i32 %env.clock(i32 1, ptr %time)
  %wait.seconds = load i64, ptr %time
  %wait.whole = mul i64 %wait.seconds, 1000000000
  %wait.rest = load i64, ptr %time.rest
  %wait.now = add i64 %wait.whole, %wait.rest
  %wait.first = icmp eq i64 %wait.since, 0
  %wait.from = select i1 %wait.first, i64 %wait.now, i64 %wait.since
  %wait.long = sub i64 %wait.now, %wait.from
  %wait.soon = icmp slt i64 %wait.long, %env.patience
  br i1 %wait.soon, label %wait.yield, label %stop
wait.yield:
  %wait.fewer = sub i64 %wait.left, 1
  call i32 %env.yield()
  br label %wait.poll
wait.seen:
  %wait.k1 = add i64 %wait.k, 1
  br label %wait
compare:
  %compare.own = inttoptr i64 %x to ptr
  br label %compare.each
compare.each:
  %compare.k = phi i64 [0, %compare], [%compare.k1, %compare.one]
  %compare.more = icmp ult i64 %compare.k, %length
  br i1 %compare.more, label %compare.one, label %advance
compare.one:
  %compare.at = getelementptr i64, ptr %list, i64 %compare.k
  %compare.base = load i64, ptr %compare.at
  %compare.address = add i64 %compare.base, %y
  %compare.theirs = inttoptr i64 %compare.address to ptr
  %compare.same = call i32 %env.compare(ptr %compare.own, ptr %compare.theirs, i64 %z)
  %compare.k1 = add i64 %compare.k, 1
  %compare.is = icmp eq i32 %compare.same, 0
  br i1 %compare.is, label %compare.each, label %stop
{streams}
{blocks}
}}
!0 = !{{i32 1}}
"""


_PAGE, _AHEAD, _BLOCK = 4096, 2 * 4096, 256  # bytes


def _stream(name: str, past: bool) -> str:
    """A copy of many bytes, to lines of 32, past the caches or through them.

    The hardware looks ahead within a page only; so where it goes on two pages further is told it here.
    """
    hint = ", !nontemporal !0" if past else ""
    loads, stores = [], []
    for at in range(0, _BLOCK, 32):
        v = f"%{name}.{at}"
        loads.append(f"  {v}.from = getelementptr i8, ptr %{name}.source, i64 {at}")
        loads.append(f"  {v} = load <4 x i64>, ptr {v}.from, align 1")
        stores.append(f"  {v}.to = getelementptr i8, ptr %{name}.target, i64 {at}")
        stores.append(f"  store <4 x i64> {v}, ptr {v}.to, align 32{hint}")
    fence = "  call void @llvm.x86.sse.sfence()\n" if past else ""
    return f"""\
{name}:
  %{name}.before = sub i64 0, %x
  %{name}.odd = and i64 %{name}.before, 31
  %{name}.short = icmp ult i64 %z, %{name}.odd
  %{name}.head = select i1 %{name}.short, i64 %z, i64 %{name}.odd
  %{name}.to = inttoptr i64 %x to ptr
  %{name}.from = inttoptr i64 %y to ptr
  call ptr %env.move(ptr %{name}.to, ptr %{name}.from, i64 %{name}.head)
  %{name}.rest = sub i64 %z, %{name}.head
  %{name}.whole = and i64 %{name}.rest, -{_BLOCK}
  %{name}.end = add i64 %{name}.head, %{name}.whole
  br label %{name}.page
{name}.page:
  %{name}.p = phi i64 [%{name}.head, %{name}], [%{name}.p1, %{name}.next]
  %{name}.pages = icmp ult i64 %{name}.p, %{name}.end
  br i1 %{name}.pages, label %{name}.ahead, label %{name}.tail
{name}.ahead:
  %{name}.further = add i64 %{name}.p, {_AHEAD}
  %{name}.soon = getelementptr i8, ptr %{name}.from, i64 %{name}.further
  call void @llvm.prefetch.p0(ptr %{name}.soon, i32 0, i32 3, i32 1)
  %{name}.there = getelementptr i8, ptr %{name}.to, i64 %{name}.further
  call void @llvm.prefetch.p0(ptr %{name}.there, i32 0, i32 3, i32 1)
  %{name}.full = add i64 %{name}.p, {_PAGE}
  %{name}.p1 = call i64 @llvm.umin.i64(i64 %{name}.full, i64 %{name}.end)
  br label %{name}.next
{name}.next:
  %{name}.j = phi i64 [%{name}.p, %{name}.ahead], [%{name}.j1, %{name}.block]
  %{name}.more = icmp ult i64 %{name}.j, %{name}.p1
  br i1 %{name}.more, label %{name}.block, label %{name}.page
{name}.block:
  %{name}.source = getelementptr i8, ptr %{name}.from, i64 %{name}.j
  %{name}.target = getelementptr i8, ptr %{name}.to, i64 %{name}.j
{chr(10).join(loads + stores)}
  %{name}.j1 = add i64 %{name}.j, {_BLOCK}
  br label %{name}.next
{name}.tail:
  %{name}.last = sub i64 %z, %{name}.end
  %{name}.source.last = getelementptr i8, ptr %{name}.from, i64 %{name}.end
  %{name}.target.last = getelementptr i8, ptr %{name}.to, i64 %{name}.end
  call ptr %env.move(ptr %{name}.target.last, ptr %{name}.source.last, i64 %{name}.last)
{fence}  br label %advance"""


def _operand(name: str, word: int) -> str:
    return f"""\
  %at.{name} = getelementptr i64, ptr %step, i64 {word}
  %number.{name} = load i64, ptr %at.{name}
  %at.register.{name} = getelementptr i64, ptr %step, i64 {word + 1}
  %register.{name} = load i64, ptr %at.register.{name}
  %in.{name} = getelementptr i64, ptr %registers, i64 %register.{name}
  %added.{name} = load i64, ptr %in.{name}
  %{name} = add i64 %number.{name}, %added.{name}"""


def _load(e: Element, to: str, address: str, lanes: int) -> list[str]:
    """``to`` = ``lanes`` elements at ``address``, as they are in registers."""
    kind = _of(e.type, lanes)
    if e.bits == e.wide:
        return [f"{to} = load {kind}, ptr {address}, align {e.bits // 8}"]
    if e.type == "half":
        wide = _of("float", lanes)
        return [
            f"{to}.half = load {kind}, ptr {address}, align 2",
            f"{to} = fpext {kind} {to}.half to {wide}",
        ]
    short, word, real = _kinds(lanes)
    return [
        f"{to}.short = load {short}, ptr {address}, align 2",
        f"{to}.word = zext {short} {to}.short to {word}",
        f"{to}.high = shl {word} {to}.word, {_splat('i32 16', lanes)}",
        f"{to} = bitcast {word} {to}.high to {real}",
    ]


def _store(e: Element, value: str, address: str, lanes: int) -> list[str]:
    kind = _of(e.type, lanes)
    if e.bits == e.wide:
        return [f"store {kind} {value}, ptr {address}, align {e.bits // 8}"]
    if e.type == "half":
        wide = _of("float", lanes)
        return [
            f"{value}.narrow = fptrunc {wide} {value} to {kind}",
            f"store {kind} {value}.narrow, ptr {address}, align 2",
        ]
    short, word, real = _kinds(lanes)  # to the nearest, ties to even; NaN stays NaN
    return [
        f"{value}.bits = bitcast {real} {value} to {word}",
        f"{value}.down = lshr {word} {value}.bits, {_splat('i32 16', lanes)}",
        f"{value}.odd = and {word} {value}.down, {_splat('i32 1', lanes)}",
        f"{value}.half = add {word} {value}.odd, {_splat('i32 32767', lanes)}",
        f"{value}.up = add {word} {value}.bits, {value}.half",
        f"{value}.rounded = lshr {word} {value}.up, {_splat('i32 16', lanes)}",
        f"{value}.nan = fcmp uno {real} {value}, {value}",
        f"{value}.picked = select {_of('i1', lanes)} {value}.nan, {word} {_splat('i32 32704', lanes)},"
        f" {word} {value}.rounded",
        f"{value}.narrow = trunc {word} {value}.picked to {short}",
        f"store {short} {value}.narrow, ptr {address}, align 2",
    ]


def _of(kind: str, lanes: int) -> str:
    return kind if lanes == 1 else f"<{lanes} x {kind}>"


def _kinds(lanes: int) -> tuple[str, str, str]:
    return _of("i16", lanes), _of("i32", lanes), _of("float", lanes)


def _splat(constant: str, lanes: int) -> str:
    return constant.split()[1] if lanes == 1 else "<" + ", ".join([constant] * lanes) + ">"


def _sum(e: Element) -> str:
    """Blocks of _UNROLLED vectors, then single elements; each time through all sources in order."""
    block = _UNROLLED * e.lanes
    return "\n".join(
        [
            f"sum.{e.name}:",
            f"  %{e.name}.whole = and i64 %z, {-block}",
            f"  br label %{e.name}.v",
            *_loop(
                e, "v", e.lanes, _UNROLLED, "0", f"sum.{e.name}", f"%{e.name}.whole", f"%{e.name}.s"
            ),
            *_loop(e, "s", 1, 1, f"%{e.name}.whole", f"{e.name}.v", "%z", "%advance"),
        ]
    )


def _loop(
    e: Element, tag: str, lanes: int, vectors: int, first: str, before: str, end: str, after: str
) -> list[str]:
    name, kind = f"{e.name}.{tag}", _of("float" if e.bits != e.wide else e.type, lanes)
    size, numbers = e.bits // 8, range(vectors)

    def loads(to: str, base: str) -> list[str]:
        lines = []
        for v in numbers:
            lines.append(
                f"%{name}.{to}at{v} = getelementptr i8, ptr {base}, i64 {v * lanes * size}"
            )
            lines += _load(e, f"%{name}.{to}{v}", f"%{name}.{to}at{v}", lanes)
        return lines

    lines = [
        f"{name}:",
        f"  %{name}.j = phi i64 [{first}, %{before}], [%{name}.j1, %{name}.store]",
        f"  %{name}.more = icmp ult i64 %{name}.j, {end}",
        f"  br i1 %{name}.more, label %{name}.begin, label {after}",
        f"{name}.begin:",
        f"  %{name}.offset = mul i64 %{name}.j, {size}",
        *_source(name, "first", "0"),
        *(f"  {line}" for line in loads("a", f"%{name}.first")),
        f"  br label %{name}.sources",
        f"{name}.sources:",
        f"  %{name}.k = phi i64 [1, %{name}.begin], [%{name}.k1, %{name}.add]",
    ]
    for v in numbers:
        lines.append(
            f"  %{name}.t{v} = phi {kind} [%{name}.a{v}, %{name}.begin], [%{name}.n{v}, %{name}.add]"
        )
    lines += [
        f"  %{name}.further = icmp ult i64 %{name}.k, %length",
        f"  br i1 %{name}.further, label %{name}.add, label %{name}.store",
        f"{name}.add:",
        *_source(name, "next", f"%{name}.k"),
        *(f"  {line}" for line in loads("b", f"%{name}.next")),
        *(f"  %{name}.n{v} = {e.add} {kind} %{name}.t{v}, %{name}.b{v}" for v in numbers),
        f"  %{name}.k1 = add i64 %{name}.k, 1",
        f"  br label %{name}.sources",
        f"{name}.store:",
        f"  %{name}.to = add i64 %x, %{name}.offset",
        f"  %{name}.top = inttoptr i64 %{name}.to to ptr",
    ]
    for v in numbers:
        lines.append(
            f"  %{name}.sat{v} = getelementptr i8, ptr %{name}.top, i64 {v * lanes * size}"
        )
        lines += [f"  {line}" for line in _store(e, f"%{name}.t{v}", f"%{name}.sat{v}", lanes)]
    return [*lines, f"  %{name}.j1 = add i64 %{name}.j, {lanes * vectors}", f"  br label %{name}"]


def _source(name: str, to: str, number: str) -> list[str]:
    """``to`` = where source ``number`` of the list is, a number and a register, at the loop's offset."""
    n = f"%{name}.{to}"
    return [
        f"  {n}.two = mul i64 {number}, 2",
        f"  {n}.at = getelementptr i64, ptr %list, i64 {n}.two",
        f"  {n}.number = load i64, ptr {n}.at",
        f"  {n}.at1 = getelementptr i64, ptr {n}.at, i64 1",
        f"  {n}.register = load i64, ptr {n}.at1",
        f"  {n}.in = getelementptr i64, ptr %registers, i64 {n}.register",
        f"  {n}.added = load i64, ptr {n}.in",
        f"  {n}.base = add i64 {n}.number, {n}.added",
        f"  {n}.address = add i64 {n}.base, %{name}.offset",
        f"  {n} = inttoptr i64 {n}.address to ptr",
    ]


def ir() -> str:
    """The whole module."""
    return _RUN.format(
        **{name: value for name, value in globals().items() if isinstance(value, int)},
        operands="\n".join(_operand(name, word) for name, word in (("x", 3), ("y", 5), ("z", 7))),
        sums="\n".join(
            f"    i64 {SUM + number}, label %sum.{e.name}" for number, e in enumerate(ELEMENTS)
        ),
        streams=_stream("stream", past=False) + "\n" + _stream("past", past=True),
        blocks="\n".join(_sum(e) for e in ELEMENTS),
    )
