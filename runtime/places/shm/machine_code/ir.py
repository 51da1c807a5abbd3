"""The LLVM IR of what runs steps (``steps.py``): copies, sums, and waiting for words of shared memory.

Text, because that is what LLVM takes. Two modules, so that a process makes the code of no sum that it does
not use::

    i64 run(i64 *words, i64 first)      the number of the step that stopped it, or -1 at the end
    void sum(i64 *registers, i64 *list, i64 length, i64 target, i64 count)

``words`` begins with what does not change, goes on with the registers, and then has STEP words for each
step: its kind, a list and its length, and three operands, each a number and the register to add to it.
The second operand of a sum is the address of its function.
"""

from dataclasses import dataclass

from interlace.runtime.places.shm.machine_code.base_ir import MONOTONIC, PROCESSORS, TICKS, base
from interlace.runtime.processes.control import ANYONE, BELL

# What does not change:
SPINS, YIELDS, PATIENCE, LONG_YIELD, CROWDED, CROWDED_UNTIL, ASLEEP = range(7)
REGISTERS = 7  # the word of register 0, which is 0 always
FIRST = 149  # the word at which the steps begin
STEP = 9  # words of each: kind, list, length, x, register, y, register, z, register
END, COPY, RELEASE, RING, WAIT, COMPARE, STREAM, PAST, SUM, STORE, STAMP = range(11)


@dataclass(frozen=True)
class Element:
    """A kind of elements: how they are loaded, added and stored."""

    name: str
    bits: int
    memory: str
    type: str  # in registers

    @property
    def lanes(self) -> int:
        """Elements of a block: 1024 bits, which LLVM cuts into what the processor has."""
        return 1024 // (self.bits if self.type == self.memory else 32)


ELEMENTS = (
    Element("float32", 32, "float", "float"),
    Element("float64", 64, "double", "double"),
    Element("float16", 16, "half", "float"),
    Element("bfloat16", 16, "i16", "float"),
    Element("int8", 8, "i8", "i8"),
    Element("int16", 16, "i16", "i16"),
    Element("int32", 32, "i32", "i32"),
    Element("int64", 64, "i64", "i64"),
)
"""Sums from left to right: integers wrap around, 16-bit floats are summed in fp32 and rounded once."""

_RUN = """
declare i32 @memcmp(ptr, ptr, i64)

define i64 @run(ptr %words, i64 %first) nounwind {{
entry:
  %at.spins = getelementptr i64, ptr %words, i64 {SPINS}
  %spins = load i64, ptr %at.spins
  %at.yields = getelementptr i64, ptr %words, i64 {YIELDS}
  %yields = load i64, ptr %at.yields
  %at.patience = getelementptr i64, ptr %words, i64 {PATIENCE}
  %patience = load i64, ptr %at.patience
  %at.turn = getelementptr i64, ptr %words, i64 {LONG_YIELD}
  %turn = load i64, ptr %at.turn
  %at.turns = getelementptr i64, ptr %words, i64 {CROWDED}
  %turns = load i64, ptr %at.turns
  %at.at.crowded = getelementptr i64, ptr %words, i64 {CROWDED_UNTIL}
  %at.crowded = load ptr, ptr %at.at.crowded
  %at.asleep = getelementptr i64, ptr %words, i64 {ASLEEP}
  %own.asleep = load ptr, ptr %at.asleep
  %own.bell = getelementptr i8, ptr %own.asleep, i64 {bell}
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
  %to = inttoptr i64 %x to ptr
  %from = inttoptr i64 %y to ptr
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
    i64 {SUM}, label %sum
    i64 {STAMP}, label %stamp
    i64 {STORE}, label %store
  ]
advance:
  br label %next
end:
  ret i64 -1
stop:
  ret i64 %i
copy:
  call ptr @memmove(ptr %to, ptr %from, i64 %z)
  br label %advance
stream:
  call void @through(ptr %to, ptr %from, i64 %z)
  br label %advance
past:
  call void @past(ptr %to, ptr %from, i64 %z)
  br label %advance
sum:
  call void %from(ptr %registers, ptr %list, i64 %length, i64 %x, i64 %z)
  br label %advance
release:
  store atomic i64 %y, ptr %to release, align 8
  br label %advance
stamp:
  %stamp.now = call i64 @now(i32 {ticks})
  store i64 %stamp.now, ptr %to
  br label %advance
store:
  %store.from = getelementptr i64, ptr %registers, i64 %y
  call ptr @memmove(ptr %to, ptr %store.from, i64 %z)
  br label %advance
ring:
  fence seq_cst
  br label %ring.more
ring.more:
  %ring.k = phi i64 [0, %ring], [%ring.k1, %ring.look], [%ring.k1, %ring.wake]
  %ring.is = icmp ult i64 %ring.k, %length
  br i1 %ring.is, label %ring.look, label %advance
ring.look:
  %ring.at = getelementptr i64, ptr %list, i64 %ring.k
  %ring.address = load ptr, ptr %ring.at
  %ring.for = load atomic i64, ptr %ring.address monotonic, align 8
  %ring.k1 = add i64 %ring.k, 1
  %ring.anyone = icmp eq i64 %ring.for, {anyone}
  %ring.us = icmp eq i64 %ring.for, %x
  %ring.either = or i1 %ring.anyone, %ring.us
  br i1 %ring.either, label %ring.wake, label %ring.more
ring.wake:
  call void @wake(ptr %ring.address)
  br label %ring.more
wait:
  %wait.k = phi i64 [0, %next], [%wait.k1, %wait.seen]
  %wait.yields = phi i64 [%yields, %next], [%wait.left, %wait.seen]
  %wait.began = phi i64 [0, %next], [%wait.since, %wait.seen]
  %wait.more = icmp ult i64 %wait.k, %length
  br i1 %wait.more, label %wait.begin, label %advance
wait.begin:
  %wait.at = getelementptr i64, ptr %list, i64 %wait.k
  %wait.address = load ptr, ptr %wait.at
  br label %wait.poll
wait.poll:
  %wait.left = phi i64 [%wait.yields, %wait.begin], [%wait.left, %wait.pause], [%wait.fewer, %wait.yield],
    [%wait.fewer, %wait.crowd], [%wait.left, %wait.up]
  %wait.spins = phi i64 [%spins, %wait.begin], [%wait.spins1, %wait.pause], [0, %wait.yield],
    [0, %wait.crowd], [0, %wait.up]
  %wait.since = phi i64 [%wait.began, %wait.begin], [%wait.since, %wait.pause], [%wait.from, %wait.yield],
    [%wait.from, %wait.crowd], [%wait.from, %wait.up]
  %wait.value = load atomic i64, ptr %wait.address acquire, align 8
  %wait.there = icmp sge i64 %wait.value, %y
  br i1 %wait.there, label %wait.seen, label %wait.not
wait.not:
  %wait.spin = icmp sgt i64 %wait.spins, 0
  br i1 %wait.spin, label %wait.pause, label %wait.patience
wait.pause:
  {pause}
  %wait.spins1 = sub i64 %wait.spins, 1
  br label %wait.poll
wait.patience:
  %wait.now = call i64 @now(i32 {monotonic})
  %wait.first = icmp eq i64 %wait.since, 0
  %wait.from = select i1 %wait.first, i64 %wait.now, i64 %wait.since
  %wait.long = sub i64 %wait.now, %wait.from
  %wait.soon = icmp slt i64 %wait.long, %patience
  br i1 %wait.soon, label %wait.look, label %stop
wait.look:
  %wait.may = icmp sgt i64 %wait.left, 0
  %wait.crowded = load i64, ptr %at.crowded
  %wait.free = icmp sgt i64 %wait.now, %wait.crowded
  br i1 %wait.free, label %wait.turn.left, label %wait.sleep
wait.turn.left:
  br i1 %wait.may, label %wait.yield, label %stop
wait.sleep:
  %wait.bell = icmp ne ptr %own.asleep, null
  br i1 %wait.bell, label %wait.ready, label %stop
wait.ready:
  %wait.rung = load atomic i32, ptr %own.bell monotonic, align 4
  %wait.id = add i64 %wait.k, %length
  %wait.at.id = getelementptr i64, ptr %list, i64 %wait.id
  %wait.for = load i64, ptr %wait.at.id
  store atomic i64 %wait.for, ptr %own.asleep monotonic, align 8
  fence seq_cst
  %wait.again = load atomic i64, ptr %wait.address acquire, align 8
  %wait.came = icmp sge i64 %wait.again, %y
  br i1 %wait.came, label %wait.up, label %wait.doze
wait.doze:
  call void @sleep(ptr %own.asleep, i32 %wait.rung)
  br label %wait.up
wait.up:
  store atomic i64 0, ptr %own.asleep monotonic, align 8
  br label %wait.poll
wait.yield:
  %wait.fewer = sub i64 %wait.left, 1
  call i32 @sched_yield()
  %wait.after = call i64 @now(i32 {monotonic})
  %wait.turn = sub i64 %wait.after, %wait.now
  %wait.whole = icmp sgt i64 %wait.turn, %turn
  br i1 %wait.whole, label %wait.crowd, label %wait.poll
wait.crowd:
  %wait.times = mul i64 %wait.turn, %turns
  %wait.until = add i64 %wait.after, %wait.times
  store i64 %wait.until, ptr %at.crowded
  br label %wait.poll
wait.seen:
  %wait.k1 = add i64 %wait.k, 1
  br label %wait
compare:
  %compare.k = phi i64 [0, %next], [%compare.k1, %compare.one]
  %compare.more = icmp ult i64 %compare.k, %length
  br i1 %compare.more, label %compare.one, label %advance
compare.one:
  %compare.at = getelementptr i64, ptr %list, i64 %compare.k
  %compare.base = load i64, ptr %compare.at
  %compare.address = add i64 %compare.base, %y
  %compare.theirs = inttoptr i64 %compare.address to ptr
  %compare.same = call i32 @memcmp(ptr %to, ptr %compare.theirs, i64 %z)
  %compare.k1 = add i64 %compare.k, 1
  %compare.is = icmp eq i32 %compare.same, 0
  br i1 %compare.is, label %compare, label %stop
}}
"""

# Blocks, then single elements; each time through all sources in order. Vectors of 512 bits convert 16-bit
# floats a fifth slower (Zen 4, November 2026). In the usual mode, as ``numerics/reductions.py``.
_SUM = """
define void @sum(ptr %registers, ptr %list, i64 %length, i64 %to, i64 %count)
    nounwind "prefer-vector-width"="256" "min-legal-vector-width"="0" {{
entry:
{usual}
  %whole = and i64 %count, -{lanes}
  br label %b
{blocks}
{single}
end:
{before}
  ret void
}}
"""

_MODES = {
    "x86_64": (
        """\
  %mode = alloca i32
  %usual = alloca i32
  store i32 8064, ptr %usual
  call void @llvm.x86.sse.stmxcsr(ptr %mode)
  call void @llvm.x86.sse.ldmxcsr(ptr %usual)""",
        "  call void @llvm.x86.sse.ldmxcsr(ptr %mode)",
    ),
    "aarch64": (
        """\
  %mode = call i64 @llvm.aarch64.get.fpcr()
  call void @llvm.aarch64.set.fpcr(i64 0)""",
        "  call void @llvm.aarch64.set.fpcr(i64 %mode)",
    ),
}
"""To the usual floating-point mode, and back to the one from before."""

_LOOP = """\
{v}:
  %{v}.j = phi i64 [{first}, %{before}], [%{v}.j1, %{v}.store]
  %{v}.more = icmp ult i64 %{v}.j, {end}
  br i1 %{v}.more, label %{v}.sources, label %{after}
{v}.sources:
  %{v}.offset = mul i64 %{v}.j, {size}
  br label %{v}.source
{v}.source:
  %{v}.k = phi i64 [0, %{v}.sources], [%{v}.k1, %{v}.add]
  %{v}.total = phi {kind} [{neutral}, %{v}.sources], [%{v}.sum, %{v}.add]
  %{v}.further = icmp ult i64 %{v}.k, %length
  br i1 %{v}.further, label %{v}.add, label %{v}.store
{v}.add:
  %{v}.two = mul i64 %{v}.k, 2
  %{v}.at = getelementptr i64, ptr %list, i64 %{v}.two
  %{v}.number = load i64, ptr %{v}.at
  %{v}.at1 = getelementptr i64, ptr %{v}.at, i64 1
  %{v}.register = load i64, ptr %{v}.at1
  %{v}.in = getelementptr i64, ptr %registers, i64 %{v}.register
  %{v}.added = load i64, ptr %{v}.in
  %{v}.base = add i64 %{v}.number, %{v}.added
  %{v}.address = add i64 %{v}.base, %{v}.offset
  %{v}.from = inttoptr i64 %{v}.address to ptr
{load}
  %{v}.sum = {add} {kind} %{v}.total, %{v}.loaded
  %{v}.k1 = add i64 %{v}.k, 1
  br label %{v}.source
{v}.store:
  %{v}.target = add i64 %to, %{v}.offset
  %{v}.into = inttoptr i64 %{v}.target to ptr
{store}
  %{v}.j1 = add i64 %{v}.j, {lanes}
  br label %{v}"""


def run(processor: str) -> str:
    """The module of ``run`` for one of PROCESSORS."""
    names = {name: value for name, value in globals().items() if isinstance(value, int)}
    names |= {"bell": BELL, "anyone": ANYONE, "ticks": TICKS, "monotonic": MONOTONIC}
    operands = "\n".join(_operand(name, word) for name, word in (("x", 3), ("y", 5), ("z", 7)))
    return base(processor) + _RUN.format(
        **names, operands=operands, pause=PROCESSORS[processor][0]
    )  # fmt: skip


def summing(e: Element, processor: str) -> str:
    """The module of ``sum`` of such elements for one of PROCESSORS."""
    blocks = _loop(e, "b", e.lanes, "0", "entry", "%whole", "s")
    single = _loop(e, "s", 1, "%whole", "b", "%count", "end")
    usual, before = _MODES[processor]
    return _SUM.format(lanes=e.lanes, blocks=blocks, single=single, usual=usual, before=before)


def _operand(name: str, word: int) -> str:
    return f"""\
  %at.{name} = getelementptr i64, ptr %step, i64 {word}
  %number.{name} = load i64, ptr %at.{name}
  %at.register.{name} = getelementptr i64, ptr %step, i64 {word + 1}
  %register.{name} = load i64, ptr %at.register.{name}
  %in.{name} = getelementptr i64, ptr %registers, i64 %register.{name}
  %added.{name} = load i64, ptr %in.{name}
  %{name} = add i64 %number.{name}, %added.{name}"""


def _loop(e: Element, v: str, lanes: int, first: str, before: str, end: str, after: str) -> str:
    """Elements ``first`` to ``end``, ``lanes`` at a time. A sum begins with what changes nothing."""
    real = e.type in ("float", "double")
    return _LOOP.format(
        v=v, lanes=lanes, first=first, before=before, end=end, after=after, size=e.bits // 8,
        kind=_of(e.type, lanes), add="fadd" if real else "add",
        neutral=_all(f"{e.type} {-0.0 if real else 0}", lanes),
        load=_lines(v, _load(e, lanes)), store=_lines(v, _store(e, lanes)),
    )  # fmt: skip


def _lines(v: str, lines: list[str]) -> str:
    return "\n".join("  " + line.replace("%", f"%{v}.") for line in lines)


def _load(e: Element, lanes: int) -> list[str]:
    """``%loaded`` = what is at ``%from``, as it is in registers."""
    memory, kind = _of(e.memory, lanes), _of(e.type, lanes)
    load = f"load {memory}, ptr %from, align {e.bits // 8}"
    if e.memory == e.type:
        return [f"%loaded = {load}"]
    if e.memory == "half":
        return [f"%half = {load}", f"%loaded = fpext {memory} %half to {kind}"]
    word = _of("i32", lanes)
    return [
        f"%short = {load}",
        f"%word = zext {memory} %short to {word}",
        f"%high = shl {word} %word, {_all('i32 16', lanes)}",
        f"%loaded = bitcast {word} %high to {kind}",
    ]


def _store(e: Element, lanes: int) -> list[str]:
    """``%total`` to ``%into``; if it becomes narrower, to the nearest, ties to even, and NaN stays NaN."""
    memory, kind = _of(e.memory, lanes), _of(e.type, lanes)

    def store(value: str) -> str:
        return f"store {memory} {value}, ptr %into, align {e.bits // 8}"

    if e.memory == e.type:
        return [store("%total")]
    if e.memory == "half":
        return [f"%narrow = fptrunc {kind} %total to {memory}", store("%narrow")]
    word = _of("i32", lanes)
    return [
        f"%bits = bitcast {kind} %total to {word}",
        f"%down = lshr {word} %bits, {_all('i32 16', lanes)}",
        f"%odd = and {word} %down, {_all('i32 1', lanes)}",
        f"%half = add {word} %odd, {_all('i32 32767', lanes)}",
        f"%up = add {word} %bits, %half",
        f"%rounded = lshr {word} %up, {_all('i32 16', lanes)}",
        f"%nan = fcmp uno {kind} %total, %total",
        f"%picked = select {_of('i1', lanes)} %nan, {word} {_all('i32 32704', lanes)}, {word} %rounded",
        f"%narrow = trunc {word} %picked to {memory}",
        store("%narrow"),
    ]


def _of(kind: str, lanes: int) -> str:
    return kind if lanes == 1 else f"<{lanes} x {kind}>"


def _all(constant: str, lanes: int) -> str:
    return constant.split()[1] if lanes == 1 else f"splat ({constant})"
