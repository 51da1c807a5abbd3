"""Instructions that a GPU lacks are refused by name, as assemblers refuse them, and no others are."""

import pathlib
import subprocess

import pytest
from triton.backends import nvidia

import interlace
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.sim.choice import arch_for
from interlace.verify import launch_ptx
from interlace_verify.ptx.targets import first_target
from sim.ptx.ptx_forms import FORMS, table
from sim.ptx.ptx_texts import kernel
from sim.ptx.test_ptx_forms import kernel as kernel_of_forms

LATER = [(gpu, text) for gpu in ("sm_90a", "sm_90") for (text,) in table(f"from {gpu} on")]
OF_EVERY_GPU = [text for (text,) in table("of every GPU")]


@pytest.mark.parametrize(("target", "text"), LATER)
def test_an_instruction_that_came_later_is_known_by_its_target(target: str, text: str) -> None:
    assert first_target(text) == target
    assert first_target(f"@!%p1 {text}") == target
    assert arch_for(frozenset({f"{{ .reg .pred p; {text} }}"})) == 90


def test_forms_need_the_target_that_they_say() -> None:
    for form in FORMS:
        parts = [first_target(part) for part in form.text.split(";")]
        found = max((int(part[3:5]) for part in parts if part), default=80)
        assert found <= max(90, form.arch) and (form.arch > 80 or found == 80), form.text


@pytest.mark.parametrize("text", OF_EVERY_GPU)
def test_others_are_not_refused(text: str) -> None:
    assert not first_target(text)


def test_the_error_names_instruction_target_and_line() -> None:
    text = kernel("elect.sync %r2|%p1, -1;")
    message = r"'elect.sync' does not exist on sm_80, but on sm_90; line \d+: elect.sync %r2"
    for arch in (80, 90):  # a text for sm_80 is one wherever it runs
        with pytest.raises(InterlaceError, match=message):
            interlace.run(lambda: launch_ptx(text, 1), 1, place="ptx", arch=arch)
    interlace.run(lambda: launch_ptx(kernel("", arch=80), 1), 1, place="ptx", arch=90)


def test_a_text_for_a_later_gpu_is_refused_by_an_earlier_one() -> None:
    text = kernel("elect.sync %r2|%p1, -1;", arch=90)
    interlace.run(lambda: launch_ptx(text, 1), 1, place="ptx", arch=90)
    with pytest.raises(ValueError, match=r"kernel is PTX for sm_90a, but arch=80 is an older GPU"):
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

    for target, text in LATER:
        assert not takes(text, "sm_80"), text
        assert takes(text, target), text
        assert target == "sm_90" or not takes(text, "sm_90"), text
    assert all(takes(text, "sm_80") for text in OF_EVERY_GPU)
