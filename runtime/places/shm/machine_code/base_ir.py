"""LLVM IR that all modules of machine code begin with: copies, the clock, and sleeping."""

from interlace.runtime.processes.control import (
    BELL,
    EVERYONE,
    FUTEX_WAIT,
    FUTEX_WAKE,
    LONGEST_SLEEP,
)

MONOTONIC, TICKS = 1, 6  # clocks of Linux; to read the first, a processor waits for its loads
_LINE, _BLOCK, _PAGE, _AHEAD = 64, 256, 4096, 2 * 4096  # bytes

PROCESSORS = {
    "x86_64": ("call void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse.sfence()", 202),
    "aarch64": ("call void @llvm.aarch64.hint(i32 1)", "", 98),
}
"""What a poll that failed does, what orders stores past the caches before a later release, and the number
of the system call ``futex``."""


# Shared. A word ASLEEP says for whom its owner sleeps (control.py); its futex is BELL bytes on.
_BASE = """
declare ptr @memmove(ptr, ptr, i64)
declare i32 @sched_yield()
declare i32 @clock_gettime(i32, ptr)
declare i64 @syscall(i64, ...)

define internal void @wake(ptr %asleep) nounwind {{
  %bell = getelementptr i8, ptr %asleep, i64 {bell}
  atomicrmw add ptr %bell, i32 1 seq_cst
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %bell, i64 {wake}, i64 {all}, ptr null, ptr null, i64 0)
  ret void
}}

define internal void @sleep(ptr %asleep, i32 %rung) nounwind {{
  %time = alloca [2 x i64]
  store [2 x i64] [i64 0, i64 {longest}], ptr %time
  %bell = getelementptr i8, ptr %asleep, i64 {bell}
  %value = zext i32 %rung to i64
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %bell, i64 {wait}, i64 %value, ptr %time, ptr null, i64 0)
  ret void
}}

define internal i64 @now(i32 %clock) nounwind {{
  %time = alloca [2 x i64]
  call i32 @clock_gettime(i32 %clock, ptr %time)
  %seconds = load i64, ptr %time
  %whole = mul i64 %seconds, 1000000000
  %at.rest = getelementptr i64, ptr %time, i64 1
  %rest = load i64, ptr %at.rest
  %now = add i64 %whole, %rest
  ret i64 %now
}}
!0 = !{{i32 1}}
"""

# The hardware looks ahead within a page only; so where it goes on two pages further is told it here.
_STREAM = """
define internal void @{name}(ptr %to, ptr %from, i64 %z) nounwind {{
entry:
  %x = ptrtoint ptr %to to i64
  %before = sub i64 0, %x
  %odd = and i64 %before, {last}
  %head = call i64 @llvm.umin.i64(i64 %z, i64 %odd)
  call ptr @memmove(ptr %to, ptr %from, i64 %head)
  %rest = sub i64 %z, %head
  %whole = and i64 %rest, -{block}
  %end = add i64 %head, %whole
  br label %page
page:
  %p = phi i64 [%head, %entry], [%p1, %next]
  %pages = icmp ult i64 %p, %end
  br i1 %pages, label %ahead, label %tail
ahead:
  %further = add i64 %p, {ahead}
  %soon = getelementptr i8, ptr %from, i64 %further
  call void @llvm.prefetch.p0(ptr %soon, i32 0, i32 3, i32 1)
  %there = getelementptr i8, ptr %to, i64 %further
  call void @llvm.prefetch.p0(ptr %there, i32 0, i32 3, i32 1)
  %full = add i64 %p, {page}
  %p1 = call i64 @llvm.umin.i64(i64 %full, i64 %end)
  br label %next
next:
  %j = phi i64 [%p, %ahead], [%j1, %move]
  %more = icmp ult i64 %j, %p1
  br i1 %more, label %move, label %page
move:
  %source = getelementptr i8, ptr %from, i64 %j
  %target = getelementptr i8, ptr %to, i64 %j
  %bytes = load <{words} x i64>, ptr %source, align 1
  store <{words} x i64> %bytes, ptr %target, align {line}{hint}
  %j1 = add i64 %j, {block}
  br label %next
tail:
  %last = sub i64 %z, %end
  %source.last = getelementptr i8, ptr %from, i64 %end
  %target.last = getelementptr i8, ptr %to, i64 %end
  call ptr @memmove(ptr %target.last, ptr %source.last, i64 %last)
  {fence}
  ret void
}}
"""


def base(processor: str) -> str:
    """What modules for one of PROCESSORS begin with: copies, the clock, and sleeping."""
    _, fence, futex = PROCESSORS[processor]
    streams = "".join(
        _STREAM.format(
            name=name, hint=hint, fence=fence, last=_LINE - 1, line=_LINE, block=_BLOCK,
            words=_BLOCK // 8, page=_PAGE, ahead=_AHEAD,
        )
        for name, hint, fence in (("through", "", ""), ("past", ", !nontemporal !0", fence))
    )  # fmt: skip
    longest = int(LONGEST_SLEEP * 1e9)
    return _BASE.format(
        bell=BELL, futex=futex, wait=FUTEX_WAIT, wake=FUTEX_WAKE, all=EVERYONE, longest=longest
    ) + streams  # fmt: skip
