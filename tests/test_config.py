"""The configuration: precedence, what is refused and how it is said, and round trips."""

import dataclasses
import json
import math
import string
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gru_ref import config as configuration
from gru_ref.config import (
    CHOICES,
    RANGES,
    Config,
    ModelConfig,
    convert,
    differences,
    from_dict,
    keys,
    load,
    to_toml,
)
from gru_ref.errors import ConfigError


def text_file(folder, text):
    path = folder / "run.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


def values(key: str) -> st.SearchStrategy:
    """Every value that `key` allows."""
    default = keys()[key]
    if key in CHOICES:
        return st.sampled_from(CHOICES[key])
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, list):
        return st.lists(st.text(st.characters(exclude_categories=()), max_size=8), max_size=3)
    if isinstance(default, str):
        return st.text(st.characters(exclude_categories=()), max_size=8)
    low, high, inclusive = RANGES[key]
    if isinstance(default, int):
        return st.integers(int(low), int(high))
    return st.floats(low, high, exclude_max=not inclusive)


def tables() -> st.SearchStrategy:
    """Nested tables with any subset of the keys."""
    flat = st.fixed_dictionaries({}, optional={key: values(key) for key in keys()})

    def nest(flat):
        nested = {}
        for key, value in flat.items():
            table, name = key.split(".")
            nested.setdefault(table, {})[name] = value
        return nested

    return flat.map(nest)


# --- precedence ---------------------------------------------------------------------------------------


def test_options_beat_the_file_beats_the_preset_beats_the_defaults(tmp_path):
    file = text_file(tmp_path, "[train]\nbatch_size = 7\nseq_len = 8\n")
    config = load(preset="gru-l3-v3a", file=file, options={"train.seq_len": 9})
    assert config.model.hidden == 2048  # preset
    assert config.train.batch_size == 7  # file over the preset's 128
    assert config.train.seq_len == 9  # option over the file
    assert config.optimizer == Config().optimizer  # default


def test_without_a_preset_the_default_preset_is_used():
    assert load() == load(preset="default")
    assert load() != Config()


@pytest.mark.parametrize("kind", CHOICES["model.kind"])
@pytest.mark.parametrize("preset", configuration.preset_names())
@pytest.mark.parametrize("where", ["file", "options"])
def test_another_kind_over_a_preset_needs_no_word_about_the_presets_own_fields(tmp_path, where, preset, kind):
    values = {"model.kind": kind, "model.dropout": 0.5}
    file = text_file(tmp_path, f'[model]\nkind = "{kind}"\ndropout = 0.5\n') if where == "file" else None
    config = load(preset=preset, file=file, options=values if where == "options" else None)
    before, after = load(preset=preset).model, config.model
    assert (after.kind, after.dropout, after.hidden) == (kind, 0.5, before.hidden)
    if before.kind == kind:
        assert after == dataclasses.replace(before, dropout=0.5)
    for other, names in configuration.FIELDS_OF_KIND.items():
        for name in names if other != kind else ():
            assert getattr(after, name) == getattr(ModelConfig, name)


@pytest.mark.parametrize("where", ["file", "options"])
def test_a_field_of_another_kind_that_the_user_gave_is_refused(tmp_path, where):
    """Even where the preset, whose word does not count, gives it too."""
    file = text_file(tmp_path, "[model]\nembedding = 64\n") if where == "file" else None
    options = {"model.kind": "gpt2"} | ({"model.embedding": 64} if where == "options" else {})
    with pytest.raises(ConfigError, match=r"model\.embedding is of gru-lm and not of gpt2; set it to 0"):
        load(file=file, options=options)


@pytest.mark.parametrize("preset", configuration.preset_names())
def test_every_preset_loads(preset):
    assert load(preset=preset).train.steps > 0


# --- every field is guarded ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", keys())
def test_every_field_has_exactly_one_guard(key):
    """A number has a range, a string has choices, and a boolean, a path or a list of names needs neither."""
    default = keys()[key]
    if isinstance(default, bool | list) or key == "data.vocab":
        assert key not in RANGES
        assert key not in CHOICES
    elif isinstance(default, str):
        assert key in CHOICES
        assert default in CHOICES[key]
    else:
        assert key in RANGES
        assert convert(key, default, "test") == default


def test_no_guard_or_resume_rule_names_a_key_that_does_not_exist():
    named = {*CHOICES, *RANGES, *configuration.FREE_ON_RESUME, *configuration.FIXED_ON_RESUME}
    assert named <= set(keys())
    assert not configuration.FREE_ON_RESUME & configuration.FIXED_ON_RESUME


@pytest.mark.parametrize("key", RANGES)
def test_a_range_ends_where_it_says(key):
    low, high, inclusive = RANGES[key]
    kind = type(keys()[key])
    beyond = 1 if kind is int else 1e-9
    assert convert(key, kind(low), "test") == low
    for value in (low - beyond, *([high] if not inclusive else [high + max(beyond, high * 1e-9)])):
        with pytest.raises(ConfigError, match=f"test: {key} must be at least"):
            convert(key, kind(value), "test")
    if inclusive:
        assert convert(key, kind(high), "test") == high
    if kind is float:
        with pytest.raises(ConfigError, match="not nan"):
            convert(key, math.nan, "test")


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\nsteps = 1", "unknown table 'trian'; did you mean 'train'?"),
        ("[zzz]\nsteps = 1", "unknown table 'zzz'; known: model, data, train, optimizer, schedule, run"),
        ("[train]\nbatchsize = 1", "unknown key 'train.batchsize'; did you mean 'train.batch_size'?"),
        ("[train]\nlr = 1", "unknown key 'train.lr'; did you mean 'schedule.lr'?"),
        ("[optimizer]\nname = 'adam'", "must be one of nadam, adamw, not 'adam'; did you mean 'nadam'?"),
        ("[schedule]\nname = 'cosin'", "not 'cosin'; did you mean 'cosine'?"),
        ('[run]\nprecision = "x\\ny"', r"must be one of fp32, fp16, bf16, not 'x\ny'"),
        ('[train]\n"a\\nb" = 1', r"unknown key 'train.a\nb'"),
        ("train = 1", "'train' must be a table, write [train]"),
        ("[train]\nsteps = 1.5", "train.steps must be a whole number, not 1.5"),
        ("[train]\nsteps = true", "train.steps must be a whole number, not True"),
        ("[train]\nsteps = 'many'", "train.steps must be a whole number, not 'many'"),
        ("[train]\nsteps = []", "train.steps must be a whole number, not []"),
        ("[train.steps]\nx = 1", "train.steps must be a whole number, not {'x': 1}"),
        ("[schedule]\nlr = true", "schedule.lr must be a number, not True"),
        ("[schedule]\nlr = 1" + "0" * 400, "schedule.lr must be a number, not 1"),
        ("[model]\ntied = 1", "model.tied must be true or false, not 1"),
        ("[model]\nkind = 1", "model.kind must be a string, not 1"),
        ("[data]\nfiles = [1]", "data.files must be a list of strings, not [1]"),
        ("[model]\nlayers = 0", "model.layers must be at least 1 and at most 10000, not 0"),
        ("[model]\ndropout = 1.0", "model.dropout must be at least 0 and below 1, not 1.0"),
        ("[schedule]\nlr = nan", "schedule.lr must be at least 0 and below inf, not nan"),
        ("[train]\nsteps = 1\nsteps = 2", "not valid TOML: Cannot overwrite a value"),
        ("[train]\nseed = " + "9" * 5000, "not valid TOML: "),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_names_the_file_and_the_remedy(tmp_path, text, message):
    file = text_file(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load(file=file)
    assert str(error.value).startswith(f"{file}: ")
    assert message in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("gru-l3-v3", "did you mean 'gru-l3-v3a'?"), ("defualt", "did you mean 'default'?"), ("zzz", "known: ")],
)
def test_an_unknown_preset_suggests_the_nearest(name, suggestion):
    with pytest.raises(ConfigError) as error:
        load(preset=name)
    assert str(error.value).startswith(f"--preset: unknown preset '{name}'; {suggestion}")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("steps", "options: unknown key 'steps'; did you mean 'train.steps'?"),
        ("optimiser.beta1", "options: unknown key 'optimiser.beta1'; did you mean 'optimizer.beta1'?"),
        ("train.a.b", "options: unknown key 'train.a.b'"),
        ("", "options: unknown key ''"),
    ],
)
def test_an_unknown_option_suggests_the_nearest(option, message):
    with pytest.raises(ConfigError) as error:
        load(options={option: "1"})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("missing", ["none.toml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, missing):
    with pytest.raises(ConfigError, match="cannot read the configuration") as error:
        load(file=tmp_path / missing)
    assert str(error.value).startswith(str(tmp_path / missing))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model.tied": True, "model.hidden": 8, "model.embedding": 4}, "model.tied needs"),
        ({"train.steps": 5, "train.epochs": 1.0}, "contradict each other"),
        ({"schedule.lr": 0.0, "schedule.min_lr": 0.0}, "schedule.lr must be above 0"),
        ({"schedule.lr": 1e-3, "schedule.min_lr": 2e-3}, "schedule.min_lr 0.002 is above schedule.lr 0.001"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        load(options=options)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    "options",
    [
        {"model.tied": True, "model.hidden": 8, "model.embedding": 8},
        {"model.tied": True, "model.hidden": 8, "model.embedding": 0},
        {"train.steps": 0, "train.epochs": 1.0},
        {"schedule.lr": 1e-3, "schedule.min_lr": 1e-3},
    ],
)
def test_settings_that_only_nearly_contradict_are_accepted(options):
    load(options=options)


@given(
    st.sampled_from(list(keys())),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text() | st.none()),
)
def test_any_value_for_any_key_is_converted_or_refused(key, value):
    """Nothing but ConfigError comes out, and what is accepted has the type of the default."""
    try:
        accepted = convert(key, value, "test")
    except ConfigError:
        return
    default = keys()[key]
    assert type(accepted) is (tuple if isinstance(default, list) else type(default))


@given(st.text(string.printable + "é\x00", max_size=60))
def test_any_text_as_a_file_is_read_or_refused(tmp_path_factory, text):
    file = text_file(tmp_path_factory.mktemp("any"), text)
    try:
        config = load(file=file)
    except ConfigError:
        return
    assert config == load()  # no text as short and random as this names a key


# --- conversion from the command line -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.steps", "1e4", 10_000),
        ("train.steps", " 12 ", 12),
        ("train.steps", 12.0, 12),
        ("train.seed", str(2**64 - 1), 2**64 - 1),
        ("schedule.lr", "2e-3", 2e-3),
        ("schedule.lr", 1, 1.0),
        ("model.tied", "TRUE", True),
        ("model.tied", "false", False),
        ("data.files", "a.txt", ("a.txt",)),
        ("data.files", ["a.txt", "b,c.txt"], ("a.txt", "b,c.txt")),
        ("optimizer.name", "adamw", "adamw"),
    ],
)
def test_a_value_is_converted_to_the_type_of_its_key(key, text, value):
    converted = convert(key, text, "test")
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize("text", ["yes", "1", ""])
def test_a_boolean_is_true_or_false_and_nothing_like_it(text):
    with pytest.raises(ConfigError, match="must be true or false"):
        convert("model.tied", text, "test")


# --- round trips --------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(tables())
def test_from_dict_inverts_to_dict_and_json_keeps_it(nested):
    config = from_dict(nested, "test")
    assert from_dict(config.to_dict(), "test") == config
    assert from_dict(json.loads(json.dumps(config.to_dict())), "test") == config
    assert differences(config, from_dict(config.to_dict(), "test")) == {}


@settings(max_examples=30)
@given(tables())
def test_toml_keeps_every_value(nested):
    """Any file name too, even one that is not text (L04)."""
    config = from_dict(nested, "test")
    assert from_dict(tomllib.loads(to_toml(config)), "test") == config


@pytest.mark.parametrize("preset", configuration.preset_names())
def test_the_written_configuration_loads_as_itself(tmp_path, preset):
    """Whatever the default preset says: the file holds every key. The byte FF is in no UTF-8 name (L04)."""
    names = ["a b/é日/-x", "\udcff.txt", 'back\\slash "quoted"\n']
    config = load(preset=preset, options={"data.files": names, "train.seed": 2**64 - 1, "schedule.lr": 0.1})
    file = text_file(tmp_path, to_toml(config))
    assert load(file=file) == config


def test_differences_are_the_keys_that_changed_with_both_values():
    old = Config()
    new = old.replace("train", seed=2).replace("data", files=("a",))
    assert differences(old, new) == {"train.seed": (1, 2), "data.files": ([], ["a"])}


def test_replace_leaves_the_original_alone():
    config = Config()
    assert config.replace("train", steps=5).train.steps == 5
    assert config == Config()
