"""What a script of a shell is read as: settings of a branch that may not be taken are not those of the run."""

from __future__ import annotations

import pytest

from sluice_convert.shell import read_script
from sluice_convert.table import Unresolved

COMMAND = 'python -m verl.trainer.main_ppo a.lr=1 "${EXTRA[@]}"\n'


def read(script: str) -> dict[str, object]:
    return {
        each.name: "uncertain" if isinstance(each.value, Unresolved) else each.value
        for each in read_script(script).settings
    }


@pytest.mark.parametrize(
    "branch",
    [
        'if [ "$DEVICE" = npu ]; then EXTRA+=( a.n=99 ); fi\n',
        'if [ "$DEVICE" = npu ]; then EXTRA=(a.n=99) ; fi\n',
        'if [ "$DEVICE" = npu ]; then echo; elif [ -d x ]; then EXTRA+=(a.n=99); fi\n',
        'if [ "${DEVICE:-gpu}" = gpu ] && which x; then EXTRA+=(a.n=99); fi\n',
        "if which x; then EXTRA+=(a.n=99); else EXTRA+=(a.n=2); fi\n",
        "if test $DEVICE = npu\nthen\n  EXTRA+=(\n    a.n=99  # it's for the others\n  )\nfi\n",
        "if [ $DEVICE = npu ]; then EXTRA+=(\n  a.n=99\n); fi\n",
        "case $DEVICE in\n  gpu|cpu) EXTRA+=(a.n=99) ;;\nesac\n",
        "case $DEVICE in\n  npu)\n    EXTRA+=(a.n=99)\n    ;;\nesac\n",
        "[ $DEVICE = npu ] && EXTRA+=(a.n=99)\n",
        "[[ $DEVICE == npu ]] || EXTRA+=(a.n=99)\n",
        "for each in $DEVICES; do EXTRA+=(a.n=99); done\n",
    ],
)
def test_what_a_branch_appends_may_not_be_given(branch: str) -> None:
    assert read(f"EXTRA=()\n{branch}{COMMAND}") == {"a.lr": "1", "a.n": "uncertain"}
    again = "EXTRA+=(a.m=3)\n"
    assert read(f"EXTRA=(a.n=2)\n{branch}{again}{COMMAND}") == {"a.lr": "1", "a.n": "uncertain", "a.m": "3"}


@pytest.mark.parametrize(
    "branch",
    [
        'if [ "${DEVICE:-gpu}" = npu ]; then EXTRA+=( a.n=99 ); fi\n',
        "if [[ ${DEVICE:-gpu} == n* ]]; then\n  EXTRA+=(a.n=99)\nelse\n  EXTRA+=(a.k=1)\nfi\n",
        'if [ "${DEVICE:-gpu}" != npu ]; then EXTRA+=(a.k=1); elif [ -d x ]; then EXTRA+=(a.n=99); else EXTRA+=(a.n=98); fi\n',
        'd=${DEVICE:-gpu}\ncase "$d" in\n  cpu|npu) EXTRA+=(a.n=99) ;;\n  gpu)\n    EXTRA+=(a.k=1)\n    ;;\n  *) EXTRA+=(a.n=98) ;;\nesac\n',
        'nodes=2\n[ $nodes -gt 4 ] && EXTRA+=(a.n=99)\n[ -z "$nodes" ] || EXTRA+=(a.k=1)\n',
        'if ! [ "${DEVICE:-gpu}" = gpu ] || [ 1 = 2 ]; then EXTRA+=(a.n=99); fi\n',
        "if [ 1 = 2 ]; then\n  if which x; then EXTRA+=(a.n=99); fi\nfi\n",
    ],
)
def test_a_branch_whose_test_the_script_decides_is_read_or_left_out(branch: str) -> None:
    found = read(f"EXTRA=(a.k=1)\n{branch}{COMMAND}")
    assert found == {"a.lr": "1", "a.k": "1"}


def test_variables_of_such_branches_are_known() -> None:
    script = 'batch=${BATCH:-}\ncase "${DEVICE:-gpu}" in\n  gpu) batch=${batch:-256} ;;\n  npu) batch=16 ;;\nesac\nlr=1\nif [ 1 = 2 ]; then lr=9; fi\n'
    assert read(f"{script}python x.py a.lr=$lr a.batch=$batch") == {"a.lr": "1", "a.batch": "256"}


def test_a_branch_that_replaces_a_list_makes_uncertain_what_was_in_it() -> None:
    assert read(f"EXTRA=(a.n=2)\nif [ $1 ]; then EXTRA=(); fi\n{COMMAND}") == {"a.lr": "1", "a.n": "uncertain"}


def test_what_is_appended_outside_of_branches_is_given() -> None:
    script = f"EXTRA=(a.n=2)\nif [ $1 ]; then echo fast; fi\nEXTRA+=(a.m=3) # no more\nWORD=x; WORD+=y\nEXTRA+=(a.w=$WORD)\n{COMMAND}"
    assert read(script) == {"a.lr": "1", "a.n": "2", "a.m": "3", "a.w": "xy"}


def test_a_command_in_a_branch_is_certain_where_no_other_one_differs() -> None:
    first, second = "python x.py a.lr=1 a.n=2", "python x.py a.lr=1 a.n=3"
    assert read(f"if [ $1 ]; then\n  {first}\nfi\n") == {"a.lr": "1", "a.n": "2"}
    assert read(f"if [ $1 ]; then {first}; else {second}; fi\n") == {"a.lr": "1", "a.n": "uncertain"}
    assert read(f"cd there && {first} 2>&1 | tee a.log\n") == {"a.lr": "1", "a.n": "2"}
    assert read(f"run() {{\n  {first}\n}}\nnow() {{ date; }}\nrun\n") == {"a.lr": "1", "a.n": "2"}


def test_a_comment_with_an_apostrophe_ends_with_its_line() -> None:
    assert read("lr=1 # it's small\npython -m x a.lr=$lr a.name='b # c' # isn't it\n") == {
        "a.lr": "1",
        "a.name": "b # c",
    }


def test_the_reason_says_that_it_is_a_branch() -> None:
    (setting,) = read_script("[ $X ] && EXTRA+=(a.n=99)\npython x.py a.lr=1 ${EXTRA[@]}").settings[1:]
    assert isinstance(setting.value, Unresolved)
    assert (str(setting.value), setting.line) == ("99", 1)
    assert "branch" in setting.value.reason
