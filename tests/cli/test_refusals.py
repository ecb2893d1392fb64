"""Bad input is one line on stderr, exit status 2, and nothing written."""

import shlex
from pathlib import Path

import pytest

from spec_trl.cli.main import main


REFUSALS = [
    ("", "the following arguments are required: COMMAND (see spec-trl --help)"),
    ("draw", "invalid choice: 'draw'"),
    # ---- predict
    ("predict p.json --batch 1,x", "argument --batch: '1,x' is not a list of integers such as 1,8,32"),
    ("predict p.json --acceptance 1.2", "--acceptance: '1.2' is not a number from 0 to 1"),
    ("predict p.json --block-efficiency nan", "'nan' is not a number above 0"),
    ("predict {profile}", "give --block-efficiency or --acceptance"),
    ("predict {profile} --draft-length 3 --block-efficiency 4.5", "lies between 1 and 4"),
    ("predict {none} --acceptance 0.9", "none.json: No such file or directory"),
    ("predict {folder} --acceptance 0.9", "Is a directory"),
    ("predict {cut} --acceptance 0.9", "cut.json is not a valid roofline profile"),
    # ---- validate, calibrate
    ("validate {hidden}", "holds no measured times; give a sweep with --csv"),
    ("validate {hidden} --csv {times}", "which has no fit; give --refit"),
    ("validate {hidden} --csv {times} --refit", "says nothing about the hardware; give --flops and --bandwidth"),
    ("validate {hidden} --csv {times} --refit --flops 2e14", "give --flops and --bandwidth"),
    ("validate {profile} --csv {sweep}", "line 2: seconds=0.0 is out of range; it must be finite and greater than 0"),
    ("calibrate model --quantization w3", "draft_quantization='w3' is unknown"),
    ("calibrate model --kernel fast", "draft_kernel='fast' is unknown"),
    ("calibrate model -o {folder}/no/profile.json", "there is no folder"),
    ("calibrate {folder}", "config.json"),
    ("calibrate model --device nowhere", "--device nowhere cannot be used here"),
    ("calibrate model --max-length 2.5", "'2.5' is not an integer of at least 1"),
    ("calibrate model --dtype int8", "invalid choice: 'int8'"),
    # ---- simulate
    ("simulate {cut}", "cut.json is not a valid cluster"),
    ("simulate {profile}", "Unexpected keyword argument"),
    ("simulate {none} -o workers.gif", "argument -o/--output: 'workers.gif': the name must end in .png, .pdf or .svg"),
    # ---- plot
    ("plot p.json --margin -1", "argument --margin: '-1' is not a number from 0 to 1"),
    ("plot -o {out}", "PROFILE is missing; name one that `spec-trl calibrate` wrote, or give --ladder"),
    ("plot {profile} -o {out} --draft-length 3,5", "--draft-length [5] was not measured"),
    ("plot {bare} -o {out}", "holds no measured times to plot"),
    ("plot {profile} --ladder {ladder} -o {out}", "leave out PROFILE, or leave out --ladder"),
    ("plot --ladder {ladder} --csv x --acceptance 0.5 -o {out}", "leave out --csv, --acceptance, or leave out"),
    ("plot --ladder {ladder} --draft-length 3 --margin 0.05 -o {out}", "leave out --draft-length, --margin, or"),
    ("plot --ladder {profile} -o {out}", "profile.json is not a valid draft ladder"),
    ("plot --ladder {old} -o {out}", "old.json is not a valid draft ladder"),
    # ---- report
    ("report", "the following arguments are required: RUN"),
    ("report {folder}/nowhere", "does not exist. Name the output_dir"),
    ("report {run} --profile {cut}", "cut.json is not a valid roofline profile"),
    ("report {edited}", "line 2: rollout.tokens: Field required"),
    # ---- bench
    ("bench model --assistant small", "'small' is not KIND=MODEL with one of the kinds model, dflash, eagle3"),
    ("bench model --temperature -1", "'-1' is not a number of at least 0"),
    ("bench {model} --draft-length 65", "draft_length=65 is out of range"),
    ("bench {model} --assistant model=a --assistant model=b", "two drafters of one kind"),
    ("bench {model} --prompts {prompts}", "needs a tokenizer"),
    ("bench {folder}/missing", "missing' is a folder that does not exist; correct the path"),
    ("bench {folder}", "has no config that transformers can read"),
    ("bench {profile}", "is a file; give the folder that it lies in"),
    ("bench {encoder}", "is of type 'clip', which transformers has no causal LM for"),
    ("bench {shell}", "cannot be loaded: OSError: Error no file named"),
    ("bench {model} --length 100000", "--length 100000 with a prompt of 32 tokens is beyond the model's context of"),
    ("bench {model} --assistant model={other}", "vocabulary of 100 tokens"),
    ("bench {model} --assistant eagle3={folder}/nothing", "is a folder that does not exist"),
]


@pytest.mark.parametrize(("line", "message"), REFUSALS)
def test_bad_input_is_one_line(
    line: str, message: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(**files) for word in shlex.split(line)]
    try:
        status = main(words)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    lines = [printed for printed in captured.err.splitlines() if "error: " in printed]
    assert status == 2 and len(lines) == 1 and message in lines[0]
    assert lines[0].startswith(f"spec-trl {words[0]}: error: " if len(words) > 1 else "spec-trl")
    if words[:1] != ["bench"]:  # which loads models, with progress bars
        assert captured.err.count("\n") == 1
        assert captured.out == "" or words[0] == "calibrate"  # which says that it takes random weights
    assert not files["out"].exists()
    assert not (files["run"] / "report").exists() and not (files["edited"] / "report").exists()
