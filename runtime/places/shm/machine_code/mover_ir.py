"""The LLVM IR of what moves messages between two ranks, see ``shm/boxes.py``.

::

    i64 move(i64 *terms, i64 **pipes, i64 count, i64 *watched, i64 words)

moves pieces through all pipes until one has moved its last (the result is its number), a watched word is
more than the value behind its address (``count`` and its number), or nothing has moved for as long as the
terms say (-1). While nothing moves it polls, then gives its core away, and then sleeps, as the terms say.
Who sleeps until there is room is woken for half a ring of it: for a piece it would be asleep again at once.
Who wakes another says so in that one's word, for others not to do so again until it has got a core.
"""

from interlace.runtime.places.shm.machine_code.base_ir import MONOTONIC, PROCESSORS, base
from interlace.runtime.processes.control import ANYONE, BELL

PIECE, SLOTS, SPINS, YIELDS, IDLE, LONG_YIELD, CROWDED, CROWDED_UNTIL, ASLEEP = range(9)
"""Terms: bytes of a piece, pieces of a ring; polls, turns given away, ns without progress; as in ``ir.py``.
ASLEEP is the address of the own word, or 0 not to sleep."""

OURS, THEIRS, DONE, SHIFT, RING, MEMORY, TOTAL, MOVED, PUTS, PAST, THEIR_ASLEEP = range(11)
"""A pipe: addresses of the counters of pieces that this end and the other have done; this end's count, and
how many slots further on in the ring piece 0 would be; the ring, the message's memory, its bytes, those
moved; whether this end puts or takes pieces, and whether past the caches; the other end's word ASLEEP."""
PIPE = 11  # words

_MOVE = """
define i64 @move(ptr %terms, ptr %pipes, i64 %count, ptr %watched, i64 %words) nounwind {{
entry:
  %at.piece = getelementptr i64, ptr %terms, i64 {PIECE}
  %piece = load i64, ptr %at.piece
  %at.slots = getelementptr i64, ptr %terms, i64 {SLOTS}
  %slots = load i64, ptr %at.slots
  %at.spins = getelementptr i64, ptr %terms, i64 {SPINS}
  %spins = load i64, ptr %at.spins
  %at.yields = getelementptr i64, ptr %terms, i64 {YIELDS}
  %yields = load i64, ptr %at.yields
  %at.idle = getelementptr i64, ptr %terms, i64 {IDLE}
  %idle = load i64, ptr %at.idle
  %at.turn = getelementptr i64, ptr %terms, i64 {LONG_YIELD}
  %turn = load i64, ptr %at.turn
  %at.turns = getelementptr i64, ptr %terms, i64 {CROWDED}
  %turns = load i64, ptr %at.turns
  %at.at.crowded = getelementptr i64, ptr %terms, i64 {CROWDED_UNTIL}
  %at.crowded = load ptr, ptr %at.at.crowded
  %at.asleep = getelementptr i64, ptr %terms, i64 {ASLEEP}
  %asleep = load ptr, ptr %at.asleep
  %bell = getelementptr i8, ptr %asleep, i64 {bell}
  %sleeps = icmp ne ptr %asleep, null
  %spins.left = alloca i64
  %yields.left = alloca i64
  %since = alloca i64
  %armed = alloca i1
  %rung = alloca i32
  %moved.any = alloca i1
  store i1 false, ptr %armed
  br label %fresh
fresh:
  store i64 %spins, ptr %spins.left
  store i64 %yields, ptr %yields.left
  store i64 0, ptr %since
  br label %scan
scan:
  store i1 false, ptr %moved.any
  br label %pipe
pipe:
  %i = phi i64 [0, %scan], [%i1, %skip]
  %i.more = icmp ult i64 %i, %count
  br i1 %i.more, label %look, label %watch
skip:
  %i1 = add i64 %i, 1
  br label %pipe
look:
  %at.c = getelementptr i64, ptr %pipes, i64 %i
  %c = load ptr, ptr %at.c
  %c.ours = getelementptr i64, ptr %c, i64 {OURS}
  %ours = load ptr, ptr %c.ours
  %c.theirs = getelementptr i64, ptr %c, i64 {THEIRS}
  %theirs = load ptr, ptr %c.theirs
  %c.done = getelementptr i64, ptr %c, i64 {DONE}
  %done = load i64, ptr %c.done
  %c.shift = getelementptr i64, ptr %c, i64 {SHIFT}
  %shift = load i64, ptr %c.shift
  %c.ring = getelementptr i64, ptr %c, i64 {RING}
  %ring = load ptr, ptr %c.ring
  %c.memory = getelementptr i64, ptr %c, i64 {MEMORY}
  %memory = load ptr, ptr %c.memory
  %c.total = getelementptr i64, ptr %c, i64 {TOTAL}
  %total = load i64, ptr %c.total
  %c.moved = getelementptr i64, ptr %c, i64 {MOVED}
  %moved = load i64, ptr %c.moved
  %c.puts = getelementptr i64, ptr %c, i64 {PUTS}
  %puts.word = load i64, ptr %c.puts
  %puts = icmp ne i64 %puts.word, 0
  %c.past = getelementptr i64, ptr %c, i64 {PAST}
  %past.word = load i64, ptr %c.past
  %past = icmp ne i64 %past.word, 0
  %c.their.asleep = getelementptr i64, ptr %c, i64 {THEIR_ASLEEP}
  %their.asleep = load ptr, ptr %c.their.asleep
  %whole = icmp uge i64 %moved, %total
  br i1 %whole, label %found, label %may
may:
  %has = load atomic i64, ptr %theirs acquire, align 8
  %ahead = sub i64 %done, %has
  %room = icmp slt i64 %ahead, %slots
  %there = icmp slt i64 %ahead, 0
  %can = select i1 %puts, i1 %room, i1 %there
  br i1 %can, label %piece.begins, label %skip
piece.begins:
  %left = sub i64 %total, %moved
  %size = call i64 @llvm.umin.i64(i64 %left, i64 %piece)
  %place = add i64 %done, %shift
  %turn.of = urem i64 %place, %slots
  %slot.offset = mul i64 %turn.of, %piece
  %slot = getelementptr i8, ptr %ring, i64 %slot.offset
  %at = getelementptr i8, ptr %memory, i64 %moved
  %to = select i1 %puts, ptr %slot, ptr %at
  %from = select i1 %puts, ptr %at, ptr %slot
  %nowhere = icmp eq ptr %memory, null
  br i1 %nowhere, label %piece.ends, label %goes
goes:
  br i1 %past, label %goes.past, label %goes.through
goes.past:
  call void @past(ptr %to, ptr %from, i64 %size)
  br label %piece.ends
goes.through:
  call void @through(ptr %to, ptr %from, i64 %size)
  br label %piece.ends
piece.ends:
  %done1 = add i64 %done, 1
  %moved1 = add i64 %moved, %size
  store i64 %done1, ptr %c.done
  store i64 %moved1, ptr %c.moved
  store atomic i64 %done1, ptr %ours release, align 8
  store i1 true, ptr %moved.any
  %last = icmp uge i64 %moved1, %total
  %backlog = sub i64 %has, %done1
  %half = lshr i64 %slots, 1
  %much = icmp sgt i64 %backlog, %half
  %not.last = xor i1 %last, true
  %later = and i1 %much, %not.last
  br i1 %later, label %next, label %tell
tell:
  fence seq_cst
  %their = load atomic i64, ptr %their.asleep monotonic, align 8
  %is.asleep = icmp ne i64 %their, 0
  br i1 %is.asleep, label %wakes, label %next
wakes:
  store atomic i64 0, ptr %their.asleep monotonic, align 8
  call void @wake(ptr %their.asleep)
  br label %next
next:
  br i1 %last, label %found, label %skip
found:
  %result.pipe = phi i64 [%i, %look], [%i, %next]
  br label %end
watch:
  %k = phi i64 [0, %pipe], [%k1, %watch.not]
  %k.more = icmp ult i64 %k, %words
  br i1 %k.more, label %watch.look, label %nothing
watch.look:
  %pair = mul i64 %k, 2
  %w = getelementptr i64, ptr %watched, i64 %pair
  %w.address = load ptr, ptr %w
  %w.at.value = getelementptr i64, ptr %w, i64 1
  %w.value = load i64, ptr %w.at.value
  %w.has = load atomic i64, ptr %w.address acquire, align 8
  %w.more = icmp sgt i64 %w.has, %w.value
  br i1 %w.more, label %watch.found, label %watch.not
watch.not:
  %k1 = add i64 %k, 1
  br label %watch
watch.found:
  %result.word = add i64 %count, %k
  br label %end
nothing:
  %any = load i1, ptr %moved.any
  %was.armed = load i1, ptr %armed
  br i1 %was.armed, label %was.to.sleep, label %not.armed
was.to.sleep:
  br i1 %any, label %disarm, label %doze
doze:
  %doze.rung = load i32, ptr %rung
  call void @sleep(ptr %asleep, i32 %doze.rung)
  br label %disarm
disarm:
  store i1 false, ptr %armed
  store atomic i64 0, ptr %asleep monotonic, align 8
  br label %not.armed.2
not.armed:
  br i1 %any, label %fresh, label %idles
not.armed.2:
  br i1 %any, label %fresh, label %scan
idles:
  %s = load i64, ptr %spins.left
  %s.more = icmp sgt i64 %s, 0
  br i1 %s.more, label %spin, label %clock
spin:
  {pause}
  %s1 = sub i64 %s, 1
  store i64 %s1, ptr %spins.left
  br label %scan
clock:
  %now = call i64 @now(i32 {monotonic})
  %since.was = load i64, ptr %since
  %since.none = icmp eq i64 %since.was, 0
  %since.is = select i1 %since.none, i64 %now, i64 %since.was
  store i64 %since.is, ptr %since
  %long = sub i64 %now, %since.is
  %over = icmp sge i64 %long, %idle
  br i1 %over, label %end, label %stay
stay:
  %y = load i64, ptr %yields.left
  %y.more = icmp sgt i64 %y, 0
  %crowded = load i64, ptr %at.crowded
  %free = icmp sgt i64 %now, %crowded
  %yield.now = and i1 %y.more, %free
  br i1 %yield.now, label %yield, label %may.sleep
yield:
  %y1 = sub i64 %y, 1
  store i64 %y1, ptr %yields.left
  call i32 @sched_yield()
  %after = call i64 @now(i32 {monotonic})
  %took = sub i64 %after, %now
  %took.long = icmp sgt i64 %took, %turn
  br i1 %took.long, label %crowd, label %scan
crowd:
  %times = mul i64 %took, %turns
  %until = add i64 %after, %times
  store i64 %until, ptr %at.crowded
  br label %scan
may.sleep:
  br i1 %sleeps, label %arm, label %end
arm:
  %rung.now = load atomic i32, ptr %bell monotonic, align 4
  store i32 %rung.now, ptr %rung
  store atomic i64 {anyone}, ptr %asleep monotonic, align 8
  fence seq_cst
  store i1 true, ptr %armed
  br label %scan
end:
  %result = phi i64 [%result.pipe, %found], [%result.word, %watch.found], [-1, %clock], [-1, %may.sleep]
  %end.armed = load i1, ptr %armed
  br i1 %end.armed, label %up, label %return
up:
  store atomic i64 0, ptr %asleep monotonic, align 8
  br label %return
return:
  ret i64 %result
}}
"""


def move(processor: str) -> str:
    """The module of ``move`` for one of PROCESSORS."""
    names = {name: value for name, value in globals().items() if isinstance(value, int)}
    more = {"bell": BELL, "anyone": ANYONE, "monotonic": MONOTONIC}
    return base(processor) + _MOVE.format(**names, **more, pause=PROCESSORS[processor][0])
