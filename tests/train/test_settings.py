"""Reading a configuration from a file and overrides, and writing it."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from shardwise.errors import ConfigError
from shardwise.train.config import Config, changed_config, read_config, to_toml
from shardwise.train.planned import toml_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 100\nwarmup_share = 0.2\n", encoding="utf-8")
    return path


def test_a_learning_rate_that_was_set_stays_set_in_other_files() -> None:
    """A run that loads weights refuses the default, but not the same value in its file."""
    for values in ({}, {"lr": 4e-3}):
        config = changed_config(Config.model_validate({"train": values}), {"run": {"name": "x"}})
        assert ("lr" in config.train.model_fields_set) == bool(values)
        assert tomllib.loads(toml_of(config)) == {"run": {"name": "x"}} | (
            {"train": values} if values else {}
        )


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.touch()
    assert read_config(empty) == Config()


def test_overrides_take_precedence_over_the_file(file: Path) -> None:
    config = read_config(file, ["train.steps=200", "data.path = some/text", "train.lr=1e-2"])
    assert config.train.steps == 200
    assert config.train.warmup_steps == 40
    assert config.train.lr == 0.01
    assert config.data.path == "some/text"


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_may_have_few_steps_because_the_warm_up_is_a_share_of_them(steps: int) -> None:
    default = Path(__file__).parents[2] / "configs" / "stdlib.toml"
    train = read_config(default, [f"train.steps={steps}"]).train
    assert (train.steps, train.warmup_steps) == (steps, 0)


@pytest.mark.parametrize(
    ("override", "value"),
    [("shard.units=auto", "auto"), ("shard.units=5000", 5000), ('shard.units="Block"', "Block")],
)
def test_an_override_is_toml_or_else_text(file: Path, override: str, value: object) -> None:
    assert read_config(file, [override]).shard.units == value


@pytest.mark.parametrize("text", ["7", "1e3", "true", "2020-01-01", "[x]"])
def test_a_text_needs_no_quotes(file: Path, text: str) -> None:
    assert read_config(file, [f"sample.prompt={text}"]).sample.prompt == text


def test_a_list_can_be_set(file: Path) -> None:
    assert read_config(file, ["train.betas=[0.8, 0.99]"]).train.betas == (0.8, 0.99)


def test_an_override_sets_one_key(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.steps: expected a valid integer"):
        read_config(file, ["train.steps=1\nother=2"])


FILE_ERRORS = {
    "[train]\nstpes = 3": r"train\.stpes: unknown key; did you mean 'steps'\?",
    "[trian]\nsteps = 3": r"trian: unknown section; did you mean 'train'\?",
    "[zebra]\nx = 3": r"zebra: unknown section; expected one of run, model, tokenizer, data",
    "train = 3": r"train: expected a table \[train\], got 3",
    "[train]\nsteps = 0": r"train\.steps: expected a number greater than or equal to 1, got 0",
    "[train]\nsteps = 1.5": r"train\.steps: expected a valid integer, got 1\.5",
    "[train]\nsteps = true": r"train\.steps: expected a valid integer, got True",
    "[train]\nlr = 'fast'": r"train\.lr: expected a valid number, got 'fast'",
    "[train]\nlr = nan": r"train\.lr: expected a finite number",
    "[train]\nbetas = [0.9]": r"train\.betas: expected one more value, got \[0\.9\]",
    "[train]\nwarmup_share = 1": r"train\.warmup_share: expected a number less than 1",
    "[model]\nwidth = 30\nheads = 4": r"width=30: expected a multiple of .* such as 24 or 32",
    "[shard]\nunits = 1.5": r"shard\.units: expected a valid string or a valid integer, got 1\.5",
    "[shard]\nnproc = 0": r"shard\.nproc: expected a number greater than or equal to 1, got 0",
    "[train\nsteps = 3": r"is not valid TOML: .*line 1",
}


@pytest.mark.parametrize(("text", "message"), FILE_ERRORS.items())
def test_an_error_in_the_file_names_file_key_and_expectation(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as raised:
        read_config(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


OVERRIDE_ERRORS = {
    "train.steps": "expected section.key=value",
    "=3": "unknown key ''",
    "steps=3": r"unknown key 'steps'; did you mean 'train\.steps'\?",
    "train.stpes=3": r"unknown key 'train.stpes'; did you mean 'train\.steps'\?",
    "train=3": "unknown key 'train'",
    "train.steps=many": r"^train\.steps: expected a valid integer, got 'many'",
}


@pytest.mark.parametrize(("override", "message"), OVERRIDE_ERRORS.items())
def test_an_error_in_an_override_does_not_name_the_file(
    file: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read_config(file, [override])
    assert str(file) not in str(raised.value)


def test_all_errors_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[train]\nsteps = 0\nlr = -1.0\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"train\.steps: .*; .*train\.lr: "):
        read_config(path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.toml: no such file"):
        read_config(tmp_path / "nope.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_config(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_config(binary)


CONFIGS = st.fixed_dictionaries(
    {
        "run": st.fixed_dictionaries({"overwrite": st.booleans()}),
        "train": st.fixed_dictionaries(
            {
                "lr": st.floats(1e-12, 1e6),
                "betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
            }
        ),
        "sample": st.fixed_dictionaries(
            {"prompt": st.text(st.characters(exclude_categories=["Cs"]), min_size=1)}
        ),
        "shard": st.fixed_dictionaries({"units": st.sampled_from(["auto", "Block", 1000])}),
    }
).map(Config.model_validate)


@given(config=CONFIGS)
def test_a_written_configuration_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, config: Config
) -> None:
    path = tmp_path_factory.mktemp("written") / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8", newline="")
    assert read_config(path) == config
