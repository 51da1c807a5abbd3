"""Instructions that a GPU lacks are refused by name, as assemblers refuse them, and no others are."""

import pathlib
import subprocess

import pytest
from triton.backends import nvidia

import interlace
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.sim.programs.choice import arch_for
from interlace.runtime.ptx.targets import needed
from interlace.verify import launch_ptx
from sim.ptx.ptx_texts import kernel
from sim.ptx.test_ptx_forms import FORMS, kernel as kernel_of_forms

LATER = {
    "sm_90a": """
        wgmma.fence.sync.aligned;
        setmaxnreg.inc.sync.aligned.u32 232;
        tensormap.replace.tile.global_address.shared::cta.b1024.b64 [pair], m;""",
    "sm_90": """
        elect.sync _|p, 0xffffffff;
        mbarrier.try_wait.parity.shared.b64 p, [pair], 0;
        mbarrier.arrive.shared.b64 dl, [pair], 2;
        mbarrier.arrive.expect_tx.shared.b64 dl, [pair], 4;
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [pair], 4;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [pair];
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [pair], [m], 16, [pair+16];
        cp.async.bulk.global.shared::cta.bulk_group [m], [pair], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [m], [pair], 16;
        fence.proxy.async;
        fence.proxy.async.shared::cta;
        fence.proxy.tensormap::generic.acquire.sys [m], 128;
        fence.mbarrier_init.release.cluster;
        fence.acq_rel.cluster;
        barrier.cluster.arrive.relaxed.aligned;
        barrier.cluster.wait;
        mapa.shared::cluster.u32 d, a, 0;
        getctarank.u64 d, m;
        ld.acquire.cluster.global.b32 d, [m];
        ld.shared::cluster.b32 d, [pair];
        isspacep.shared::cluster p, m;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [pair], a, [pair+8];
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [pair], {a};
        prefetch.tensormap [m];
        mov.u32 d, %cluster_ctarank;
        setp.lt.bf16 p, ah, bh;
        cvt.rn.bf16.s32 dh, a;
        mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {dl,dl,dl,dl},{al,al,al,al},{bl,bl},{cl,cl,cl,cl};
        """,
}
LATER_ONES = [
    (target, one.strip()) for target, text in LATER.items() for one in text.splitlines() if one
]
LATER_ONES = [(target, one) for target, one in LATER_ONES if one]
OF_EVERY_GPU = """
    mbarrier.test_wait.parity.shared::cta.b64 p, [pair], 0;
    mbarrier.arrive.release.cta.shared::cta.b64 dl, [pair];
    mbarrier.arrive.noComplete.shared.b64 dl, [pair], 2;
    cp.async.mbarrier.arrive.shared.b64 [pair];
    fence.proxy.alias;
    barrier.cta.sync 0;
    cvt.rna.tf32.f32 d, a;
    red.global.add.noftz.f16x2 [m], a;
    min.bf16x2 d, a, b;
    max.s32 d, a, b;
    mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {dl,dl}, {al}, {bl}, {cl,cl};"""
OF_EVERY_GPU_ONES = [one.strip() for one in OF_EVERY_GPU.splitlines() if one.strip()]


@pytest.mark.parametrize(("target", "text"), LATER_ONES)
def test_an_instruction_that_came_later_is_known_by_its_target(target: str, text: str) -> None:
    assert needed(text) == target
    assert needed(f"@!%p1 {text}") == target
    assert arch_for(frozenset({f"{{ .reg .pred p; {text} }}"})) == 90


def test_forms_need_the_target_that_they_say() -> None:
    for form in FORMS:
        parts = [needed(part) for part in form.text.split(";")]
        found = max((int(part[3:5]) for part in parts if part), default=80)
        assert found <= max(90, form.arch) and (form.arch > 80 or found == 80), form.text


@pytest.mark.parametrize("text", OF_EVERY_GPU_ONES)
def test_others_are_not_refused(text: str) -> None:
    assert not needed(text)


def test_the_error_names_instruction_target_and_line() -> None:
    text = kernel("elect.sync %r2|%p1, -1;")
    message = r"'elect.sync' is not there on sm_80, but on sm_90; line \d+: elect.sync %r2"
    for arch in (80, 90):  # a text for sm_80 is one wherever it runs
        with pytest.raises(InterlaceError, match=message):
            interlace.run(lambda: launch_ptx(text, 1), 1, place="ptx", arch=arch)
    interlace.run(lambda: launch_ptx(kernel("", arch=80), 1), 1, place="ptx", arch=90)


def test_a_text_for_a_later_gpu_is_refused_by_an_earlier_one() -> None:
    text = kernel("elect.sync %r2|%p1, -1;", arch=90)
    interlace.run(lambda: launch_ptx(text, 1), 1, place="ptx", arch=90)
    with pytest.raises(ValueError, match=r"kernel is PTX for sm_90a, and arch=80 is a GPU before"):
        interlace.run(lambda: launch_ptx(text, 1), 1, place="ptx", arch=80)
    with pytest.raises(InterlaceError, match=r"no \.target"):
        without = text.replace(".target sm_90a", "")
        interlace.run(lambda: launch_ptx(without, 1), 1, place="ptx", arch=90)


@pytest.mark.thorough
def test_an_assembler_says_the_same(tmp_path: pathlib.Path) -> None:
    assembler = pathlib.Path(nvidia.__file__).parent / "bin" / "ptxas"

    def takes(text: str, target: str) -> bool:
        form = FORMS[0]._replace(text=f".shared .align 128 .b64 pair[16]; {text}", given=[])
        (tmp_path / "one.ptx").write_text(kernel_of_forms([form], target))
        command = [
            assembler,
            f"--gpu-name={target}",
            "-O0",
            "-o",
            "/dev/null",
            tmp_path / "one.ptx",
        ]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    for target, text in LATER_ONES:
        assert not takes(text, "sm_80"), text
        assert takes(text, target), text
        assert target == "sm_90" or not takes(text, "sm_90"), text
    assert all(takes(text, "sm_80") for text in OF_EVERY_GPU_ONES)
