; LLVM IR that machine_code.py compiles: steps of collectives, sums, and messages between two ranks.
;
; Sections begin with "; ===" and a name. Python replaces words that follow a dollar: by numbers that have names
; in Python, by types of elements, and by the processor's own instructions.

; === base
; All modules except sums begin with this: the clock, and sleeping. A word ASLEEP has the rank for which its owner
; sleeps; the futex is BELL bytes after it. Clock 1 is monotonic, and clock 6 is its last tick: a processor that
; reads clock 1 waits for its loads.
declare ptr @memmove(ptr, ptr, i64)
declare i32 @sched_yield()
declare i32 @clock_gettime(i32, ptr)
declare i64 @syscall(i64, ...)

define internal void @wake(ptr %asleep) nounwind {
  %bell = getelementptr i8, ptr %asleep, i64 $BELL
  atomicrmw add ptr %bell, i32 1 seq_cst
  call i64 (i64, ...) @syscall(i64 $futex, ptr %bell, i64 $FUTEX_WAKE, i64 $EVERYONE, ptr null, ptr null, i64 0)
  ret void
}

define internal void @sleep(ptr %asleep, i32 %rung) nounwind {
  %time = alloca [2 x i64]
  store [2 x i64] [i64 0, i64 $longest], ptr %time
  %bell = getelementptr i8, ptr %asleep, i64 $BELL
  %value = zext i32 %rung to i64
  call i64 (i64, ...) @syscall(i64 $futex, ptr %bell, i64 $FUTEX_WAIT, i64 %value, ptr %time, ptr null, i64 0)
  ret void
}

define internal i64 @now(i32 %clock) nounwind {
  %time = alloca [2 x i64]
  call i32 @clock_gettime(i32 %clock, ptr %time)
  %seconds = load i64, ptr %time
  %whole = mul i64 %seconds, 1000000000
  %at.rest = getelementptr i64, ptr %time, i64 1
  %rest = load i64, ptr %at.rest
  %now = add i64 %whole, %rest
  ret i64 %now
}
!0 = !{i32 1}

; === stream
; Copies many bytes, through the caches or past them. The hardware prefetches only within a page, so this code
; prefetches the page that is two pages ahead.
define internal void @$name(ptr %to, ptr %from, i64 %z) nounwind {
entry:
  %x = ptrtoint ptr %to to i64
  %before = sub i64 0, %x
  %odd = and i64 %before, 63
  %head = call i64 @llvm.umin.i64(i64 %z, i64 %odd)
  call ptr @memmove(ptr %to, ptr %from, i64 %head)
  %rest = sub i64 %z, %head
  %whole = and i64 %rest, -256
  %end = add i64 %head, %whole
  br label %page
page:
  %p = phi i64 [%head, %entry], [%p1, %next]
  %pages = icmp ult i64 %p, %end
  br i1 %pages, label %ahead, label %tail
ahead:
  %further = add i64 %p, 8192
  %soon = getelementptr i8, ptr %from, i64 %further
  call void @llvm.prefetch.p0(ptr %soon, i32 0, i32 3, i32 1)
  %there = getelementptr i8, ptr %to, i64 %further
  call void @llvm.prefetch.p0(ptr %there, i32 0, i32 3, i32 1)
  %full = add i64 %p, 4096
  %p1 = call i64 @llvm.umin.i64(i64 %full, i64 %end)
  br label %next
next:
  %j = phi i64 [%p, %ahead], [%j1, %move]
  %more = icmp ult i64 %j, %p1
  br i1 %more, label %move, label %page
move:
  %source = getelementptr i8, ptr %from, i64 %j
  %target = getelementptr i8, ptr %to, i64 %j
  %bytes = load <32 x i64>, ptr %source, align 1
  store <32 x i64> %bytes, ptr %target, align 64$hint
  %j1 = add i64 %j, 256
  br label %next
tail:
  %last = sub i64 %z, %end
  %source.last = getelementptr i8, ptr %from, i64 %end
  %target.last = getelementptr i8, ptr %to, i64 %end
  call ptr @memmove(ptr %target.last, ptr %source.last, i64 %last)
  $fence
  ret void
}

; === run
; Runs the steps; returns the number of the step that stopped it, or -1 at the end. The words begin with constants,
; go on with the registers, and then have STEP words for each step: its kind, a list and its length, and three
; operands. An operand is a number and the register to add to it. The second operand of a sum is its function's address.
declare i32 @memcmp(ptr, ptr, i64)

define i64 @run(ptr %words, i64 %first) nounwind {
entry:
  %at.spins = getelementptr i64, ptr %words, i64 $SPINS
  %spins = load i64, ptr %at.spins
  %at.yields = getelementptr i64, ptr %words, i64 $YIELDS
  %yields = load i64, ptr %at.yields
  %at.patience = getelementptr i64, ptr %words, i64 $PATIENCE
  %patience = load i64, ptr %at.patience
  %at.turn = getelementptr i64, ptr %words, i64 $LONG_YIELD
  %turn = load i64, ptr %at.turn
  %at.turns = getelementptr i64, ptr %words, i64 $CROWDED
  %turns = load i64, ptr %at.turns
  %at.at.crowded = getelementptr i64, ptr %words, i64 $CROWDED_UNTIL
  %at.crowded = load ptr, ptr %at.at.crowded
  %at.asleep = getelementptr i64, ptr %words, i64 $ASLEEP
  %own.asleep = load ptr, ptr %at.asleep
  %own.bell = getelementptr i8, ptr %own.asleep, i64 $BELL
  %registers = getelementptr i64, ptr %words, i64 $REGISTERS
  br label %next
next:
  %i = phi i64 [%first, %entry], [%following, %advance]
  %number = mul i64 %i, $STEP
  %word = add i64 %number, $FIRST
  %step = getelementptr i64, ptr %words, i64 %word
  %kind = load i64, ptr %step
  %at.list = getelementptr i64, ptr %step, i64 1
  %list = load ptr, ptr %at.list
  %at.length = getelementptr i64, ptr %step, i64 2
  %length = load i64, ptr %at.length
  %at.x = getelementptr i64, ptr %step, i64 3
  %number.x = load i64, ptr %at.x
  %at.register.x = getelementptr i64, ptr %step, i64 4
  %register.x = load i64, ptr %at.register.x
  %in.x = getelementptr i64, ptr %registers, i64 %register.x
  %added.x = load i64, ptr %in.x
  %x = add i64 %number.x, %added.x
  %at.y = getelementptr i64, ptr %step, i64 5
  %number.y = load i64, ptr %at.y
  %at.register.y = getelementptr i64, ptr %step, i64 6
  %register.y = load i64, ptr %at.register.y
  %in.y = getelementptr i64, ptr %registers, i64 %register.y
  %added.y = load i64, ptr %in.y
  %y = add i64 %number.y, %added.y
  %at.z = getelementptr i64, ptr %step, i64 7
  %number.z = load i64, ptr %at.z
  %at.register.z = getelementptr i64, ptr %step, i64 8
  %register.z = load i64, ptr %at.register.z
  %in.z = getelementptr i64, ptr %registers, i64 %register.z
  %added.z = load i64, ptr %in.z
  %z = add i64 %number.z, %added.z
  %to = inttoptr i64 %x to ptr
  %from = inttoptr i64 %y to ptr
  %following = add i64 %i, 1
  switch i64 %kind, label %stop [
    i64 $END, label %end
    i64 $COPY, label %copy
    i64 $RELEASE, label %release
    i64 $RING, label %ring
    i64 $WAIT, label %wait
    i64 $COMPARE, label %compare
    i64 $STREAM, label %stream
    i64 $PAST, label %past
    i64 $SUM, label %sum
    i64 $STAMP, label %stamp
    i64 $STORE, label %store
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
  %stamp.now = call i64 @now(i32 6)
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
  %ring.anyone = icmp eq i64 %ring.for, $ANYONE
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
  $pause
  %wait.spins1 = sub i64 %wait.spins, 1
  br label %wait.poll
wait.patience:
  %wait.now = call i64 @now(i32 1)
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
  %wait.after = call i64 @now(i32 1)
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
}

; === sum
; Sums blocks, then single elements, each from all sources in order. Vectors of 512 bits convert 16-bit floats a
; fifth slower (Zen 4, November 2026). It runs in the usual floating-point mode, as numerics/reductions.py does.
define void @sum(ptr %registers, ptr %list, i64 %length, i64 %to, i64 %count)
    nounwind "prefer-vector-width"="256" "min-legal-vector-width"="0" {
entry:
$usual
  %whole = and i64 %count, -$lanes
  br label %b
$blocks
$single
end:
$before
  ret void
}

; === loop
; Sums the elements from first to end, a vector of lanes at a time. A sum begins with the neutral element.
$v:
  %$v.j = phi i64 [$first, %$before], [%$v.j1, %$v.store]
  %$v.more = icmp ult i64 %$v.j, $end
  br i1 %$v.more, label %$v.sources, label %$after
$v.sources:
  %$v.offset = mul i64 %$v.j, $size
  br label %$v.source
$v.source:
  %$v.k = phi i64 [0, %$v.sources], [%$v.k1, %$v.add]
  %$v.total = phi $kind [$neutral, %$v.sources], [%$v.sum, %$v.add]
  %$v.further = icmp ult i64 %$v.k, %length
  br i1 %$v.further, label %$v.add, label %$v.store
$v.add:
  %$v.two = mul i64 %$v.k, 2
  %$v.at = getelementptr i64, ptr %list, i64 %$v.two
  %$v.number = load i64, ptr %$v.at
  %$v.at1 = getelementptr i64, ptr %$v.at, i64 1
  %$v.register = load i64, ptr %$v.at1
  %$v.in = getelementptr i64, ptr %registers, i64 %$v.register
  %$v.added = load i64, ptr %$v.in
  %$v.base = add i64 %$v.number, %$v.added
  %$v.address = add i64 %$v.base, %$v.offset
  %$v.from = inttoptr i64 %$v.address to ptr
$load
  %$v.sum = $add $kind %$v.total, %$v.loaded
  %$v.k1 = add i64 %$v.k, 1
  br label %$v.source
$v.store:
  %$v.target = add i64 %to, %$v.offset
  %$v.into = inttoptr i64 %$v.target to ptr
$store
  %$v.j1 = add i64 %$v.j, $lanes
  br label %$v

; === load plain
; Loads the elements at from, in the type of registers.
  %${v}.loaded = load $memory, ptr %${v}.from, align $bytes

; === load float16
  %${v}.half = load $memory, ptr %${v}.from, align $bytes
  %${v}.loaded = fpext $memory %${v}.half to $kind

; === load bfloat16
  %${v}.short = load $memory, ptr %${v}.from, align $bytes
  %${v}.word = zext $memory %${v}.short to $word
  %${v}.high = shl $word %${v}.word, $sixteen
  %${v}.loaded = bitcast $word %${v}.high to $kind

; === store plain
; Stores the total; a narrower type is rounded to nearest, ties to even, and NaN stays NaN.
  store $memory %${v}.total, ptr %${v}.into, align $bytes

; === store float16
  %${v}.narrow = fptrunc $kind %${v}.total to $memory
  store $memory %${v}.narrow, ptr %${v}.into, align $bytes

; === store bfloat16
  %${v}.bits = bitcast $kind %${v}.total to $word
  %${v}.down = lshr $word %${v}.bits, $sixteen
  %${v}.odd = and $word %${v}.down, $one
  %${v}.half = add $word %${v}.odd, $half
  %${v}.up = add $word %${v}.bits, %${v}.half
  %${v}.rounded = lshr $word %${v}.up, $sixteen
  %${v}.nan = fcmp uno $kind %${v}.total, %${v}.total
  %${v}.picked = select $truth %${v}.nan, $word $nan, $word %${v}.rounded
  %${v}.narrow = trunc $word %${v}.picked to $memory
  store $memory %${v}.narrow, ptr %${v}.into, align $bytes

; === usual mode x86_64
; Sets the usual floating-point mode, and later restores the previous mode.
  %mode = alloca i32
  %usual = alloca i32
  store i32 8064, ptr %usual
  call void @llvm.x86.sse.stmxcsr(ptr %mode)
  call void @llvm.x86.sse.ldmxcsr(ptr %usual)

; === mode before x86_64
  call void @llvm.x86.sse.ldmxcsr(ptr %mode)

; === usual mode aarch64
  %mode = call i64 @llvm.aarch64.get.fpcr()
  call void @llvm.aarch64.set.fpcr(i64 0)

; === mode before aarch64
  call void @llvm.aarch64.set.fpcr(i64 %mode)

; === move
; Moves pieces of messages through all pipes. It returns a pipe's number when that pipe has moved its last piece,
; count and the number of a watched word when that word is more than the value at its address, or -1 when nothing
; has moved for the time in the terms. While nothing moves it polls, then yields its core, and then sleeps, as the
; terms say. A sender that sleeps until a ring has room is woken when half a ring is free: after a single piece it
; would sleep again at once. A rank that wakes another notes this in the other's word, so that no rank wakes it again
; before it has got a core.
define i64 @move(ptr %terms, ptr %pipes, i64 %count, ptr %watched, i64 %words) nounwind {
entry:
  %at.piece = getelementptr i64, ptr %terms, i64 $PIECE
  %piece = load i64, ptr %at.piece
  %at.slots = getelementptr i64, ptr %terms, i64 $SLOTS
  %slots = load i64, ptr %at.slots
  %at.spins = getelementptr i64, ptr %terms, i64 $SPINS
  %spins = load i64, ptr %at.spins
  %at.yields = getelementptr i64, ptr %terms, i64 $YIELDS
  %yields = load i64, ptr %at.yields
  %at.idle = getelementptr i64, ptr %terms, i64 $IDLE
  %idle = load i64, ptr %at.idle
  %at.turn = getelementptr i64, ptr %terms, i64 $LONG_YIELD
  %turn = load i64, ptr %at.turn
  %at.turns = getelementptr i64, ptr %terms, i64 $CROWDED
  %turns = load i64, ptr %at.turns
  %at.at.crowded = getelementptr i64, ptr %terms, i64 $CROWDED_UNTIL
  %at.crowded = load ptr, ptr %at.at.crowded
  %at.asleep = getelementptr i64, ptr %terms, i64 $ASLEEP
  %asleep = load ptr, ptr %at.asleep
  %bell = getelementptr i8, ptr %asleep, i64 $BELL
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
  %c.ours = getelementptr i64, ptr %c, i64 $OURS
  %ours = load ptr, ptr %c.ours
  %c.theirs = getelementptr i64, ptr %c, i64 $THEIRS
  %theirs = load ptr, ptr %c.theirs
  %c.done = getelementptr i64, ptr %c, i64 $DONE
  %done = load i64, ptr %c.done
  %c.shift = getelementptr i64, ptr %c, i64 $SHIFT
  %shift = load i64, ptr %c.shift
  %c.ring = getelementptr i64, ptr %c, i64 $RING
  %ring = load ptr, ptr %c.ring
  %c.memory = getelementptr i64, ptr %c, i64 $MEMORY
  %memory = load ptr, ptr %c.memory
  %c.total = getelementptr i64, ptr %c, i64 $TOTAL
  %total = load i64, ptr %c.total
  %c.moved = getelementptr i64, ptr %c, i64 $MOVED
  %moved = load i64, ptr %c.moved
  %c.puts = getelementptr i64, ptr %c, i64 $PUTS
  %puts.word = load i64, ptr %c.puts
  %puts = icmp ne i64 %puts.word, 0
  %c.past = getelementptr i64, ptr %c, i64 $PAST
  %past.word = load i64, ptr %c.past
  %past = icmp ne i64 %past.word, 0
  %c.their.asleep = getelementptr i64, ptr %c, i64 $THEIR_ASLEEP
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
  $pause
  %s1 = sub i64 %s, 1
  store i64 %s1, ptr %spins.left
  br label %scan
clock:
  %now = call i64 @now(i32 1)
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
  %after = call i64 @now(i32 1)
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
  store atomic i64 $ANYONE, ptr %asleep monotonic, align 8
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
}
