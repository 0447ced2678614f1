import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.analyse import AnalyseConfig
from configs.eval import EvaluationConfig
from configs.loader import ConfigError, describe, dump, fields, load, load_as
from configs.schema import RunConfig
from configs.sft import SftConfig


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_no_argument_is_the_quickstart():
    assert load().name == "quickstart"


def test_overrides_win_over_the_file_and_are_parsed_as_yaml(tmp_path):
    path = write(tmp_path, "seed: 3\nrollout: {groups: 2}\n")
    config = load(
        path,
        ["rollout.groups=5", "async.max_staleness=0", "trees.train_kinds=[main, side]", "learner.aux_credit=scaled"],
    )
    assert (config.seed, config.rollout.groups, config.async_.max_staleness) == (3, 5, 0)
    assert config.trees.train_kinds == ["main", "side"]


def test_dump_and_load_are_inverse(tmp_path):
    config = load(None, ["seed=9", "model.path=/some/where", "learner.tis_cap=null"])
    assert load(write(tmp_path, dump(config))) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rolout.groups=4", ["rolout", "rollout"]),
        ("rollout.group=4", ["rollout.group", "did you mean 'rollout.groups'"]),
        ("grop_size=4", ["grop_size", "rollout.group_size"]),
        ("max_staleness=4", ["max_staleness", "async.max_staleness"]),
        ("rollout=4", ["rollout", "group of settings"]),
        ("seed.x=4", ["seed", "valid integer", "{'x': 4}"]),
        ("rollout.groups=many", ["rollout.groups", "many"]),
        ("rollout.groups=0", ["rollout.groups", "greater than or equal to 1"]),
        ("harness.max_turns", ["key.path=value"]),
        ("seed=[1", ["not valid YAML"]),
        ("engine.dtype=float8", ["engine.dtype", "float32", "float8"]),
        ("learner.minibatches=1000", ["learner.minibatches", "1000", "64"]),
        ("engine.kind=endpoint", ["engine.kind=endpoint", "steps=40", "expected 0", "evaluation only"]),
        ("trees.train_kinds=[main, side]", ["learner.aux_credit", "outcome or scaled"]),
        ("learner.aux_credit=outcome", ["trees.train_kinds", "outcome or scaled"]),
        ("update.transport=tensor", ["update.transport", "only engine.kind=sglang"]),
        ("update.mode=restart", ["update.mode", "abort_and_resume", "restart"]),
        ("mix=[{name: agent_loop}, {name: agent_loop, max_turns: 3}]", ["mix", "agent_loop", "expected a label"]),
        ("mix=[{name: agent_loop, label: ../x}]", ["mix.0.label", "../x"]),
        ("trees.keep_steps=2", ["trees.keep_steps", "at least", "11"]),
    ],
)
def test_a_bad_override_is_named_with_what_was_got_and_expected(override, words):
    with pytest.raises(ConfigError) as error:
        load(None, [override])
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "word"), [("- a\n- b\n", "mapping"), ("a: [1\n", "not valid YAML"), ("wandb: 3\n", "group of settings")]
)
def test_a_bad_file_is_named(tmp_path, text, word):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(path) in str(error.value)
    assert word in str(error.value)


def test_a_missing_file_is_named_and_examples_are_given(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml.*quickstart\.yaml"):
        load(tmp_path / "none.yaml")


def test_every_setting_is_described_in_the_help():
    text = describe()
    for key, field in fields():
        assert f"  {key} = " in text
        assert field.description, key


def test_all_shipped_configs_are_valid():
    others = {"sft.yaml": SftConfig, "analyse.yaml": AnalyseConfig}
    others |= dict.fromkeys(("eval.yaml", "eval_space.yaml", "harness_scaling_eval.yaml"), EvaluationConfig)
    for path in sorted(Path(sys.modules["configs"].__path__[0]).rglob("*.yaml")):
        if path.name == "sweep.yaml":
            continue  # W&B's own; tests/configs/test_sweep.py reads it.
        assert load_as(others.get(path.name, RunConfig), path)


def test_importing_the_settings_imports_neither_torch_nor_ray():
    code = "import sys, configs.loader; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_help_and_dry_run_import_neither_torch_nor_ray():
    code = (
        "import sys, algos.run as r\n"
        "assert r.main(['--dry-run', 'seed=4']) == 0\n"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("harness.name=none_such", ["harness.name", "agent_loop"]),
        ("model.path=/none/such", ["model.path", "config.json"]),
        ("mix=[{name: agent_loop}, {name: a}, {name: b}]", ["mix.1: harness.name 'a'", "mix.2: harness.name 'b'"]),
        ("tasks.path=/none/such", ["/none/such"]),
        ("tasks.path=/none[/such]", ["/none[/such]"]),
        ("dir=/etc/passwd", ["/etc/passwd"]),
        ("name='[bold]x[/red]'", ["name", "pattern"]),
        ("name=../x", ["name", "pattern"]),
        ("learner.learning_rate=.inf", ["learner.learning_rate", "finite"]),
        (f"seed={'[' * 3000}", ["not valid YAML"]),
    ],
)
def test_what_cannot_run_is_said_before_anything_starts(override, words, capsys):
    from algos.run import main

    assert main(["--dry-run", override]) == 2
    shown = capsys.readouterr().err.replace("\n", "")
    for word in words:
        assert word in shown


def test_help_names_what_the_quickstart_sets_otherwise():
    line = next(line for line in describe().splitlines() if line.strip().startswith("harness.max_turns ="))
    assert "quickstart: 6" in line


@pytest.mark.parametrize(
    ("path", "overrides", "says"),
    [
        (None, ["learner.zz=1"], "learner has "),
        (None, ["learner.learning_rat=1"], "did you mean 'learner.learning_rate'"),
        (Path("learner.learning_rate"), [], "expected learner.learning_rate=VALUE"),
        (Path("none.yaml"), [], "quickstart.yaml"),
        (None, ["mix=[{name: agent_loop}, {lable: x}]"], "unknown key 'mix.1.lable'; did you mean 'mix.1.label'?"),
        (None, ["mix=[agent_loop]"], "mix.0: expected a group of settings such as {name: ...} (got 'agent_loop')"),
        (None, ["mix=[{name: agent_loop}]", "harness.name=codex"], "harness.name: got codex beside mix"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(path, overrides, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(path, overrides)


def test_a_fault_of_a_group_does_not_repeat_all_of_it():
    with pytest.raises(ConfigError, match="argv: got none") as caught:
        load(None, ["harness.name=command", "harness.env={KEY: secret}"])
    assert "secret" not in str(caught.value)
