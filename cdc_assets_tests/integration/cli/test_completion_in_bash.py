"""The README's line for a shell's completion, in a real bash."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import cdc_assets

REPOSITORY = Path(cdc_assets.__file__).parents[1]
# What bash does at a TAB: it calls the function that was named for the command.
_TAB = """
found=$(complete -p cdc-assets); found=${found#*-F }; found=${found%% *}
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
"$found" cdc-assets "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def line(shell: str = "bash") -> str:
    """What the README has one put into a shell's start file; of others it has the word."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    [found] = re.findall(r"`(eval \"\$\(_CDC_ASSETS_COMPLETE=.*?\)\")`", text)
    assert shell == "bash" or f"`{shell}_source`" in text
    assert "bash_source" in found
    return str(found).replace("bash_source", f"{shell}_source")


def bash(script: str, folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (["veri"], ["verify"]),
        (["mat"], ["materialize"]),
        (["drop-"], ["drop-group", "drop-source", "drop-table"]),
        (["config", "s"], ["schema"]),
        (["sync", "--js"], ["--json"]),
        (["resync", "public.o"], ["public.orders"]),
        (["nothing-of-ours"], [""]),
    ],
)
def test_bash_completes_what_was_begun(
    tmp_path: Path, typed: list[str], completed: list[str]
) -> None:
    (tmp_path / "cdc_assets.yaml").write_text("{name: s, tables: [public.orders, public.parts]}")
    words = shlex.join(["cdc-assets", *typed])
    assert bash(f"{line()}\nCOMP_WORDS=({words})\n{_TAB}", tmp_path).splitlines() == completed


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_of_their_own(tmp_path: Path, shell: str) -> None:
    command = line(shell).removeprefix("eval ")
    said = bash(f"printf '%s' {command}", tmp_path)
    assert f"_CDC_ASSETS_COMPLETE={shell}_complete" in said
