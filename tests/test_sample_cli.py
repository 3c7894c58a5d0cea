"""`gru-ref sample`: what it prints, streams and refuses (S01–S03, L01, L04)."""

import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gru_ref import cli
from gru_ref.checkpoint import save_checkpoint
from gru_ref.checkpoint.find import checkpoints_of, newest_checkpoint
from gru_ref.checkpoint.layout import SCALARS, Checkpoint
from gru_ref.config import Config
from gru_ref.data.tokenizers import get_tokenizer
from gru_ref.errors import UsageError
from gru_ref.generate import generate
from gru_ref.models.gru_lm import GRULM

# The locale of a bare machine: ASCII, and Python not told to use UTF-8 all the same.
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
VOCAB = {"ascii100": 100, "bytes": 257, "ids": 12}


def new_model(tokenizer, seed=1):
    config = Config().replace("model", layers=1, hidden=8, vocab_size=VOCAB[tokenizer])
    model = GRULM(config.model, seed=seed)
    model.initialise()
    return model


def save(path, model, tokenizer):
    path.parent.mkdir(parents=True, exist_ok=True)
    trainer = {name.rpartition("/")[2]: 0 for name in SCALARS if name.startswith("/trainer/")}
    trainer["seed"] = Config().train.seed
    checkpoint = Checkpoint(
        config=replace(Config().replace("data", tokenizer=tokenizer), model=model.config),
        model=model.arena.param,
        moments={},
        optimizer={"step": 0, "mu_product": 1.0},
        trainer=trainer,
    )
    save_checkpoint(path, checkpoint)
    return str(path)


def writing(characters):
    """A 'bytes' model that greedily writes the given distinct bytes over and over, from any other token.

    The embedding marks the byte, n = tanh(8·mark) is the new state because z is 0, and the classifier reads
    the next byte off it.
    """
    config = Config().replace("model", layers=1, hidden=len(characters), vocab_size=257).model
    model = GRULM(config)
    p, H = model.arena.param, config.hidden
    p["embedding.weight"][:, H - 1] = 8
    for i, byte in enumerate(characters):
        p["embedding.weight"][byte] = 8 * np.eye(H)[i]
        p["classifier.weight"][characters[(i + 1) % H], i] = 8
    p["gru.0.weight_ih"][2 * H :] = np.eye(H)
    p["gru.0.bias_ih"][H : 2 * H] = -50
    return model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint of an untrained model for each tokenizer, and one that writes 日 byte by byte."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {name: save(folder / f"{name}.h5", new_model(name), name) for name in VOCAB}
    made["japanese"] = save(folder / "japanese.h5", writing("日".encode()), "bytes")
    return made


@pytest.fixture
def sample(capsysbinary):
    """Run `gru-ref sample` in this process: (exit code, standard output, standard error)."""

    def call(*args):
        code = cli.run(["sample", *args])
        out, err = capsysbinary.readouterr()
        return code, out, err.decode()

    return call


def process(*args, env=None, stdout=subprocess.PIPE):
    command = [sys.executable, "-m", "gru_ref.cli", "sample", *args]
    environment = {**os.environ, **(env or {})}
    return subprocess.Popen(command, env=environment, stdout=stdout, stderr=subprocess.PIPE)


# What is printed -------------------------------------------------------------------------------------------


def test_the_prompt_is_printed_then_the_text_then_a_newline(sample, checkpoints):
    model = new_model("ascii100")
    prompt = [45, 78]  # "Hi"
    expected = list(generate(model, prompt, 40, temperature=0.5, top_k=20, top_p=0.9, seed=7))
    options = ["--temperature", "0.5", "--top-k", "20", "--top-p", "0.9", "--seed", "7"]
    code, out, err = sample(checkpoints["ascii100"], "--prompt", "Hi", "-n", "40", *options)
    assert (code, err) == (0, "")
    assert out == b"Hi" + get_tokenizer("ascii100").decode(expected) + b"\n"


def test_json_has_prompt_text_ids_and_settings(sample, checkpoints):
    args = [checkpoints["ascii100"], "--prompt", "Hi", "-n", "30", "--temperature", "0"]
    code, out, _ = sample(*args, "--json")
    result = json.loads(out)
    assert code == 0
    assert result["prompt"] == "Hi"
    assert result["prompt_ids"] == [45, 78]
    assert result["ids"] == list(generate(new_model("ascii100"), [45, 78], 30, temperature=0))
    assert result["checkpoint"] == checkpoints["ascii100"]
    assert result["settings"] == {
        "n": 30,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 1,
        "kernels": "numpy",
    }
    _, printed, _ = sample(*args)
    assert printed.decode() == "Hi" + result["text"] + "\n"


@pytest.mark.parametrize("prompt", ["", " ", "\n", "-x", "--", "--json", "a" * 500, "tail\n"])
def test_any_prompt_is_echoed_as_it_was_given(sample, checkpoints, prompt):
    """S03: nothing is stripped, cropped or taken for an option; n = 0 prints the prompt alone."""
    for args in (["--prompt", prompt], [f"--prompt={prompt}"]):
        assert sample(checkpoints["bytes"], "-n", "0", *args) == (0, prompt.encode() + b"\n", "")
        assert sample(checkpoints["bytes"], "-n", "0", "--raw", *args) == (0, prompt.encode(), "")


def test_an_empty_prompt_starts_as_after_a_newline(sample, checkpoints):
    for args in ([], ["--prompt", ""]):
        _, out, _ = sample(checkpoints["ascii100"], *args, "-n", "20", "--temperature", "0", "--json")
        assert json.loads(out)["prompt_ids"] == [4]
        assert json.loads(out)["ids"] == list(generate(new_model("ascii100"), [4], 20, temperature=0))


def test_a_prompt_file_is_read_to_its_last_byte(sample, checkpoints, tmp_path):
    file = tmp_path / "prompt"
    file.write_bytes(b"a\r\nb\xff\n")
    expected = sample(checkpoints["bytes"], "--raw", "-n", "9", "--prompt", os.fsdecode(b"a\r\nb\xff\n"))
    assert expected[1].startswith(b"a\r\nb\xff\n")
    assert sample(checkpoints["bytes"], "--raw", "-n", "9", "--prompt-file", str(file)) == expected


def test_unknown_bytes_of_the_prompt_are_counted_in_one_line(sample, checkpoints):
    code, out, err = sample(checkpoints["ascii100"], "--prompt", "é日x\t", "-n", "0", "--json")
    assert code == 0
    assert err == (
        "gru-ref: 6 of the prompt's 7 bytes are unknown to tokenizer 'ascii100' and are read as its unknown "
        "token\n"
    )
    assert json.loads(out)["prompt_ids"] == [1, 1, 1, 1, 1, 93, 1]
    assert json.loads(out)["prompt"] == "é日x\t"
    assert sample(checkpoints["bytes"], "--prompt", "é日x\t", "-n", "0")[2] == ""


def test_a_model_of_token_ids_reads_and_prints_ids(sample, checkpoints):
    expected = list(generate(new_model("ids"), [5, 11], 6, seed=3))
    args = [checkpoints["ids"], "--prompt", " 5\n11 ", "-n", "6", "--seed", "3"]
    code, out, _ = sample(*args)
    assert code == 0
    assert [int(word) for word in out.split()] == [5, 11, *expected]
    assert json.loads(sample(*args, "--json")[1])["ids"] == expected


def test_both_kernel_sets_can_be_asked_for(sample, checkpoints):
    args = [checkpoints["ascii100"], "-n", "5", "--temperature", "0"]
    assert sample(*args, "--kernels", "numba") == sample(*args, "--kernels", "numpy")


# Characters ------------------------------------------------------------------------------------------------


def test_a_character_split_over_tokens_is_printed_whole(sample, checkpoints):
    """L04: the model writes the bytes e6, 97, a5 in turn."""
    args = [checkpoints["japanese"], "--temperature", "0", "--prompt", "x"]
    assert sample(*args, "-n", "9")[1].decode() == "x\u65e5\u65e5\u65e5\n"
    assert sample(*args, "-n", "7")[1].decode() == "x\u65e5\u65e5\ufffd\n"
    assert sample(*args, "-n", "7", "--raw")[1] == b"x" + "日日".encode() + b"\xe6"


def test_a_character_that_begins_in_the_prompt_is_printed_whole(sample, checkpoints):
    prompt = os.fsdecode(b"\xe6\x97")
    args = [checkpoints["japanese"], "--temperature", "0", "--prompt", prompt]
    assert sample(*args, "-n", "4")[1].decode() == "\u65e5\u65e5\n"


def test_streamed_text_is_the_raw_output_decoded_at_once(sample, checkpoints):
    """L04, on the noise of an untrained model, control characters included."""
    args = [checkpoints["bytes"], "-n", "250"]
    text = sample(*args, "--raw")[1].decode("utf-8", "replace")
    assert sample(*args)[1].decode() == text + "\n"
    assert json.loads(sample(*args, "--json")[1])["text"] == text


def test_no_character_fails_in_the_c_locale(checkpoints):
    """L04: escaped as text, untouched as raw bytes; and a prompt that is not UTF-8 arrives as its bytes."""
    args = [checkpoints["japanese"], "--temperature", "0", "-n", "4", "--prompt", b"\xff\xc3\xa9"]
    out, err = process(*args, env=C_LOCALE).communicate()
    assert (out, err) == (b"\\ufffd\\xe9\\u65e5\\ufffd\n", b"")
    out, err = process(*args, "--raw", env=C_LOCALE).communicate()
    assert (out, err) == (b"\xff\xc3\xa9\xe6\x97\xa5\xe6", b"")


def test_a_terminal_shows_control_characters_as_text(checkpoints, tmp_path):
    """An escape sequence from a model must not reach the terminal; whole characters still do."""
    path = save(tmp_path / "escape.h5", writing(b"\x1b\x07\n"), "bytes")
    reader, terminal = pty.openpty()
    child = process(
        path, "--temperature", "0", "-n", "3", "--prompt", "日", stdout=terminal, env={"PYTHONUTF8": "1"}
    )
    assert child.wait() == 0
    os.close(terminal)
    shown = os.read(reader, 1000)
    os.close(reader)
    child.stderr.close()
    assert shown == "日\\x1b\\x07\r\n\r\n".encode()  # the terminal itself makes \r\n of \n


# Closed pipes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_ends_it_quietly(checkpoints, unbuffered):
    """L01: `gru-ref sample … -n 1000000 | head -c 5`."""
    child = process(checkpoints["ascii100"], "-n", "1000000", env={"PYTHONUNBUFFERED": unbuffered})
    assert len(child.stdout.read(5)) == 5
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait() == 141
    child.stderr.close()


def test_a_standard_output_that_was_never_open_is_no_error(checkpoints):
    """L01: `>&-`."""
    command = [sys.executable, "-m", "gru_ref.cli", "sample", checkpoints["ascii100"], "-n", "5"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


# What is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "-1"], "temperature must be at least 0 and finite, not -1.0; 0 is greedy"),
        (["--temperature", "nan"], "temperature must be at least 0 and finite, not nan; 0 is greedy"),
        (["--temperature", "inf"], "temperature must be at least 0 and finite, not inf; 0 is greedy"),
        (["--top-k", "-1"], "top-k must be at least 0, not -1; 0 turns it off"),
        (["--top-p", "0"], "top-p must be above 0 and at most 1, not 0.0; 1 turns it off"),
        (["-n", "-1"], "n must be at least 0, not -1"),
        (["--seed", "-1"], "seed must lie in 0…2^64−1, not -1"),
        (["--raw", "--json"], "--raw and --json contradict each other; give one"),
        (["--kernels", "cuda"], "unknown backend 'cuda'; known: numpy, numba"),
    ],
)
def test_a_setting_out_of_range_is_one_line_and_nothing_is_printed(sample, checkpoints, args, message):
    """S01, S02."""
    code, out, err = sample(checkpoints["ascii100"], "--prompt", "x", *args)
    assert (code, out, err) == (2, b"", f"gru-ref: error: {message}\n")


def test_two_prompts_a_missing_file_and_a_folder_are_refused_in_one_line(sample, checkpoints, tmp_path):
    file = tmp_path / "prompt"
    file.write_bytes(b"x")
    for args in (
        ["--prompt", "", "--prompt-file", str(file)],
        ["--prompt-file", str(tmp_path / "missing")],
        ["--prompt-file", str(tmp_path)],
    ):
        code, out, err = sample(checkpoints["ascii100"], *args)
        assert (code, out, err.count("\n")) == (2, b"", 1)
        assert "--prompt-file" in err


@pytest.mark.parametrize("prompt", ["", "five", "5 12", "5 -1", "9" * 30])
def test_a_prompt_of_wrong_ids_is_refused(sample, checkpoints, prompt):
    code, out, err = sample(checkpoints["ids"], "--prompt", prompt)
    assert (code, out, err.count("\n")) == (2, b"", 1)


def test_weights_that_overflow_the_precision_are_one_line(sample, tmp_path):
    model = new_model("ascii100")
    model.arena.param["classifier.bias"][:] = 3e38
    model.arena.param["classifier.weight"][:] = 3e38
    model.arena.param["gru.0.bias_ih"][16:] = 9
    path = save(tmp_path / "huge.h5", model, "ascii100")
    code, _, err = sample(path, "-n", "3")
    assert (code, err.count("\n")) == (1, 1)
    assert "the largest logit is inf" in err


# Which checkpoint ------------------------------------------------------------------------------------------


def test_a_run_directory_stands_for_its_newest_checkpoint(sample, tmp_path):
    """By the step in the name: the files are written from the newest to the oldest."""
    folder = tmp_path / "run" / "checkpoints"
    for step in (100_000_000, 99_999_999, 5):
        save(folder / f"step-{step:08d}.h5", new_model("ascii100", seed=step), "ascii100")
    for other in ("step-200000000.h5.md5", ".step-300000000.h5.1.tmp", "step-7.h5", "best.h5", "step-x.h5"):
        (folder / other).touch()
    (folder / "step-400000000.h5").mkdir()
    steps = [int(path.stem[5:]) for path in checkpoints_of(tmp_path / "run")]
    assert steps == [5, 99_999_999, 100_000_000]
    newest = folder / "step-100000000.h5"
    assert newest_checkpoint(tmp_path / "run") == newest
    assert newest_checkpoint(str(newest)) == newest
    assert sample(str(tmp_path / "run"), "-n", "9") == sample(str(newest), "-n", "9")


def test_a_path_without_a_checkpoint_says_what_to_name(sample, tmp_path):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, problem in (
        (tmp_path / "missing", "does not exist"),
        (tmp_path, "holds no checkpoints/step-*.h5"),
        (tmp_path / "empty", "holds no checkpoints/step-*.h5"),
        (pipe, "is neither a file nor a folder"),
    ):
        message = f"{path}: {problem}; name a checkpoint or a run directory"
        with pytest.raises(UsageError) as raised:
            newest_checkpoint(path)
        assert str(raised.value) == message
        assert sample(str(path)) == (2, b"", f"gru-ref: error: {message}\n")


def test_a_damaged_checkpoint_is_one_line_and_exit_code_1(sample, checkpoints, tmp_path):
    data = Path(checkpoints["ascii100"]).read_bytes()
    path = tmp_path / "cut.h5"
    path.write_bytes(data[: len(data) // 2])
    code, out, err = sample(str(path))
    assert (code, out, err.count("\n")) == (1, b"", 1)
    assert str(path) in err
